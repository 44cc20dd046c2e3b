"""Notebook 08: what the paper does not try; trees, sampled drafts, and what bounds them."""
