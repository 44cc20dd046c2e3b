"""A drafter made over several sittings: text that grows shard by shard, training that goes on, what each doubling buys."""
