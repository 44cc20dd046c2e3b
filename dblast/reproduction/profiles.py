"""Profiles: every number that determines a reproduction run, in one place.

A profile is a tuple of plans, one per target (or one per value of a sweep).
Durations in comments were measured on two cores.
"""

from __future__ import annotations

from dataclasses import replace

from dblast.errors import DBlastError
from dblast.reproduction.plans import (
    MAIN,
    DataConfig,
    DiagnosisConfig,
    DrafterConfig,
    Plan,
    Profile,
    TinyTargetConfig,
    Variant,
)
from dblast.training import TrainingConfig

#: What Table 3 adds to them.
CATEGORY_ABLATION = (Variant(2, "NLL"), Variant(2, "AL"), Variant(8, "NLL"), Variant(8, "AL"))
#: Losses that notebook 06 puts beside the paper's two, on the same start, data and steps.
OTHER_LOSSES = ("CE", "TRUNC", "EAL", "DPACE", "FOCAL", "CHAIN", "L2R", "TV", "NLA", "LK", "KD")
#: What Table 4 adds to them.
CONSTRUCTION_ABLATION = tuple(
    Variant(k, "AL", construction) for k in (1, 4) for construction in ("whole_block", "one_prefix")
)


TINY = Plan(
    target="tiny",
    label="tiny",
    tiny=TinyTargetConfig(),
    data=DataConfig(prompts="synthetic", training_prompts=4096, evaluation_per_task=32, batch_size=256),
    drafter=DrafterConfig(layers=2, taps=(0, 1, 2), start="random"),
    pretrain=TrainingConfig(
        loss="CE", optimizer="muon", steps=1200, learning_rate=2e-3, sequences=16, anchors=16, evaluate_every=200
    ),
    finetune=TrainingConfig(steps=250, learning_rate=2e-3, sequences=8, anchors=16, evaluate_every=50),
    variants=MAIN + CATEGORY_ABLATION + CONSTRUCTION_ABLATION,
    seeds=(0, 1, 2),
    diagnosis=DiagnosisConfig(task="story"),
)

_SMOLLM2_DATA = DataConfig(
    # As many responses as fine-tuning reads in its one pass: 100 steps of 4.
    training_prompts=400, training_tokens=64, evaluation_per_task=24, evaluation_tokens=64, batch_size=128
)

SMOLLM2 = Plan(
    target="smollm2",
    label="smollm2",
    data=_SMOLLM2_DATA,
    drafter=DrafterConfig(layers=3, taps=(1, 8, 14, 21, 27), draft_vocabulary=8192, start="shipped"),
    # What made the shipped drafter, and what `python -m dblast pretrain --target smollm2` runs.
    pretrain=TrainingConfig(
        loss="KD",
        optimizer="muon",
        steps=3600,
        learning_rate=1e-3,
        matrix_learning_rate=0.02,
        sequences=8,
        anchors=32,
        precision="bfloat16",
        evaluate_every=100,
    ),
    pretrain_data=replace(_SMOLLM2_DATA, training_prompts=4096, training_tokens=128),
    finetune=TrainingConfig(
        steps=100, learning_rate=3e-4, sequences=4, anchors=32, precision="bfloat16", evaluate_every=20
    ),
    variants=MAIN + CATEGORY_ABLATION + CONSTRUCTION_ABLATION,
    precision="bfloat16",
    seeds=(0, 1, 2),
    diagnosis=DiagnosisConfig(
        oracle_prefixes=48, oracle_continuations=64, training_prompts=256, points=240, rejection_anchors=2
    ),
)


def _qwen3(size: str) -> Plan:
    """The paper's targets and drafters (its Table 8) on one GPU, with fewer and shorter training responses.

    The paper trains on 760,000 responses of up to 2,048 tokens. Tapped states
    are stored here, 2 * m * H bytes a token (26 kB for the 4B target): 20,000
    responses of up to 512 tokens already take some 200 GB of disk.
    """
    return Plan(
        target=f"Qwen/Qwen3-{size}",
        label=f"qwen3-{size.lower()}",
        data=DataConfig(
            prompts="hub",
            training_prompts=20_000,
            training_tokens=512,
            evaluation_per_task=0,
            evaluation_tokens=256,
            batch_size=128,
        ),
        drafter=DrafterConfig(layers=5, block_length=15, start=f"z-lab/Qwen3-{size}-DFlash-b16"),
        pretrain=TrainingConfig(loss="CE", steps=1, learning_rate=1e-4),
        finetune=TrainingConfig(
            steps=5_000,
            learning_rate=1e-4,
            sequences=4,
            anchors=64,
            precision="bfloat16",
            evaluate_every=500,
            checkpoint_every=1000,
        ),
        variants=MAIN + CATEGORY_ABLATION + CONSTRUCTION_ABLATION,
        precision="bfloat16",
        parallel=False,
        # The training mixture does not mark creative prompts.
        diagnosis=DiagnosisConfig(training_tasks=("chat",), training_prompts=5_000, points=5_000),
    )


#: Thresholds of the AL loss, block lengths and training setting of profile ``sweeps``; what they vary around is TINY's.
SWEPT_TAU = (0.0, 0.01, 0.03, 0.3, 1.0)
SWEPT_BLOCK_LENGTHS = (3, 11, 15)
SWEPT_TRAINING_SETTING = "low"


def _sweeps() -> tuple[Plan, ...]:
    """Plans that differ from Table 2's in one value each; the drafters they start from are pre-trained as ever."""
    tiny = replace(TINY, variants=MAIN)
    smollm2 = replace(SMOLLM2, variants=MAIN)
    taus = (
        replace(
            tiny,
            label=f"tiny-tau{tau:g}",
            variants=tuple(v for v in MAIN if v.loss == "AL"),
            finetune=replace(tiny.finetune, tau=tau),
        )
        for tau in SWEPT_TAU
    )
    lengths = (
        replace(
            tiny,
            label=f"tiny-b{b}",
            # Independent drafts, dependent ones, and the whole method.
            variants=tuple(v for v in MAIN if v.method != "DFlash+AL"),
            drafter=replace(tiny.drafter, block_length=b),
        )
        for b in SWEPT_BLOCK_LENGTHS
    )
    trained = (
        replace(
            plan,
            label=f"{plan.label}-{SWEPT_TRAINING_SETTING}",
            data=replace(plan.data, training_setting=SWEPT_TRAINING_SETTING),
            pretrain_data=plan.pretrain_data or plan.data,
        )
        for plan in (tiny, smollm2)
    )
    return (tiny, *taus, smollm2, *trained, *lengths)


PROFILES: dict[str, Profile] = {
    "smoke": Profile(
        "smoke",
        (
            replace(
                TINY,
                tiny=TinyTargetConfig(steps=200),
                data=replace(TINY.data, training_prompts=512, evaluation_per_task=16),
                pretrain=replace(TINY.pretrain, steps=200, evaluate_every=100),
                finetune=replace(TINY.finetune, steps=80, evaluate_every=40),
                variants=MAIN,
                seeds=(0,),
                diagnosis=replace(
                    TINY.diagnosis, oracle_prefixes=24, oracle_continuations=64, training_prompts=256, points=96
                ),
            ),
            replace(
                SMOLLM2,
                data=replace(
                    SMOLLM2.data,
                    training_prompts=48,
                    training_tokens=24,
                    evaluation_per_task=4,
                    evaluation_tokens=24,
                    settings=("high", "low"),
                    calibration_fraction=0.25,
                ),
                finetune=replace(SMOLLM2.finetune, steps=5, anchors=16, evaluate_every=5),
                variants=MAIN,
                seeds=(0,),
                diagnosis=replace(
                    SMOLLM2.diagnosis,
                    setting="low",
                    oracle_prefixes=4,
                    oracle_continuations=8,
                    training_prompts=16,
                    points=8,
                    continuations=8,
                ),
            ),
        ),
        minutes=8,
    ),
    # Added up: 62 from an empty cache without SmolLM2's ablations (Tables 3 and 4), 23 for these.
    "cpu": Profile("cpu", (TINY, SMOLLM2), minutes=85),
    "losses": Profile(
        "losses",
        tuple(
            replace(plan, variants=MAIN + tuple(Variant(k, loss) for loss in OTHER_LOSSES for k in (1, 4)), seeds=seeds)
            for plan, seeds in ((TINY, (0, 1, 2)), (SMOLLM2, (0,)))
        ),
        # With what a cpu run leaves in the cache.
        minutes=57,
        notebooks=("06",),
    ),
    # With what a cpu run leaves in the cache.
    "sweeps": Profile("sweeps", _sweeps(), minutes=70, notebooks=("07",)),
    # With what a cpu run leaves in the cache; of the first fine-tuning seed alone, and of SmolLM2 with DFlash alone.
    "beyond": Profile(
        "beyond",
        (replace(TINY, variants=MAIN, seeds=(0,)), replace(SMOLLM2, variants=MAIN[:1], seeds=(0,))),
        notebooks=("08",),
    ),
    "qwen3-4b": Profile("qwen3-4b", (_qwen3("4B"),)),
    "qwen3-8b": Profile("qwen3-8b", (_qwen3("8B"),)),
}


def get_profile(name: str) -> Profile:
    """A profile by name; DBlastError lists the known ones."""
    if name not in PROFILES:
        raise DBlastError(f"unknown profile {name!r}; known profiles: {', '.join(PROFILES)}")
    return PROFILES[name]
