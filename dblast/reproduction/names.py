"""Names that a user chooses among, apart from what they mean: the command line shows them before torch is loaded."""

#: See :mod:`dblast.reproduction.profiles`.
PROFILES = ("smoke", "cpu", "losses", "sweeps", "beyond", "qwen3-4b", "qwen3-8b")
#: Losses of the paper and of DFlash, see :mod:`dblast.losses`.
LOSSES = ("NLL", "AL", "CE")
#: Other papers' objectives, see :mod:`dblast.reproduction.objectives`; names that end in 1 use the sampled token alone.
OBJECTIVES = ("DPACE", "TRUNC", "FOCAL", "CHAIN", "L2R", "EAL", "TV1", "NLA1", "LK1", "TV", "NLA", "LK", "KD")
#: What the AL loss sums over.
AL_CONSTRUCTIONS = ("all_prefixes", "one_prefix", "whole_block")
#: Of determinism, see :data:`dblast.sampling.SETTINGS`.
SETTINGS = ("high", "medium", "low")
#: How blocks are drafted, see :mod:`dblast.verifier`.
MODES = ("greedy_branch", "soft", "independent", "tree")
#: Prompts that are no file, see :func:`dblast.reproduction.prompts.sources.load_prompts`.
PROMPT_SOURCES = ("bundled", "hub")
#: Ends of the names of files that hold a table, of which a column may be prompts.
TABLE_FILES = (".parquet", ".csv", ".jsonl")
#: What a drafter starts from if not from a checkpoint's folder or id, see :class:`dblast.reproduction.plans.DrafterConfig`.
STARTS = ("shipped", "target", "random")
