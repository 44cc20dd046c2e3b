"""What a reproduction run is made of: variants, plans of one target, profiles of several plans."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from dblast.errors import DBlastError
from dblast.reproduction import objectives  # noqa: F401  (adds the losses of other papers to dblast.losses.LOSSES)
from dblast.reproduction.fields import check_fields
from dblast.reproduction.language.synthetic import KINDS
from dblast.reproduction.prompts.sources import load_prompts
from dblast.sampling import get_setting
from dblast.support.checks import check_whole
from dblast.training import TrainingConfig

#: Seeds up to here leave room for what is added to them, for every generator in use.
LARGEST_SEED = 2**62
#: What a loaded target may compute in.
PRECISIONS = ("float32", "bfloat16", "float16")
CATEGORY_TEMPERATURES = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0, 1.2, 1.4)


@dataclass(frozen=True)
class Variant:
    """One fine-tuned drafter: how many categories, which loss.

    ``construction`` is that of the AL loss (Table 4) and without meaning for NLL.
    """

    K: int
    loss: str
    construction: str = "all_prefixes"

    @property
    def method(self) -> str:
        """The paper's name: DFlash, DFlash+AL, DFlash+DS (dependent, NLL) or DBlast (dependent, AL); other losses by name."""
        if self.loss not in ("NLL", "AL"):
            return f"{'DFlash' if self.K == 1 else 'DFlash+DS'}+{self.loss}"
        if self.K == 1:
            return "DFlash" if self.loss == "NLL" else "DFlash+AL"
        return "DFlash+DS" if self.loss == "NLL" else "DBlast"


#: The four variants of Table 2.
MAIN = (Variant(1, "NLL"), Variant(1, "AL"), Variant(4, "NLL"), Variant(4, "AL"))
#: What Figure 1 compares.
FIGURE1 = (Variant(1, "NLL"), Variant(4, "AL"))


@dataclass(frozen=True)
class TinyTargetConfig:
    """How the tiny target is trained on the synthetic language."""

    steps: int = 450
    batch_size: int = 32
    learning_rate: float = 3e-3
    seed: int = 0


@dataclass(frozen=True)
class DataConfig:
    """Trajectories of one target.

    Attributes:
        prompts: "synthetic" (tiny), "bundled", "hub", a JSONL path for evaluation, or "own:<hash>": encoded prompts for
            training and evaluation that :mod:`dblast.reproduction.prompts.own` keeps.
        tasks: only these tasks (None = all).
        training_prompts: number of training prompts, one response each.
        training_setting: sampling setting of the training trajectories.
        evaluation_per_task: evaluation prompts per task (0 = all).
        training_tokens, evaluation_tokens: response budget.
        settings: evaluation settings.
        calibration_fraction: share of evaluation prompts used only to choose Z_T.
    """

    prompts: str = "bundled"
    tasks: tuple[str, ...] | None = None
    training_prompts: int = 1024
    training_setting: str = "high"
    evaluation_per_task: int = 48
    training_tokens: int = 88
    evaluation_tokens: int = 88
    settings: tuple[str, ...] = ("high", "medium", "low")
    calibration_fraction: float = 0.1
    batch_size: int = 64
    seed: int = 0


@dataclass(frozen=True)
class DrafterConfig:
    """Shape and start of the DFlash drafter.

    Attributes:
        layers, taps: draft layers, tapped target layers (None: the default spread).
        block_length: b.
        draft_vocabulary: number of tokens the drafter may propose (0 = all).
        start: "random", "target" (copy target layers), "shipped" (the trained drafter in ``data/checkpoints``)
            or the path or id of a public DFlash checkpoint. The first two are pre-trained.
        start_layers: target layers to copy (None: the last ones).
        mask_token_id: token of the draft slots (None: the one known for the target).
    """

    layers: int = 2
    taps: tuple[int, ...] | None = None
    block_length: int = 7
    draft_vocabulary: int = 0
    start: str = "target"
    start_layers: tuple[int, ...] | None = None
    mask_token_id: int | None = None
    seed: int = 0

    @property
    def pretrained_here(self) -> bool:
        """Whether the start is untrained weights, to be pre-trained by this project."""
        return self.start in ("random", "target")


@dataclass(frozen=True)
class DiagnosisConfig:
    """What notebook 01 measures on a target: oracle proposals, and the paper's Figure 1.

    Attributes:
        oracle_prefixes, oracle_continuations: truncation points per setting, and continuations of each (halved:
            one half makes the proposal, the other scores it).
        setting: sampling setting of Figure 1, for its training responses and its continuations.
        task: its evaluation prompts; ``training_tasks`` its training prompts (None: the same task).
        training_prompts: its training responses.
        points: truncation points on training prompts, and as many on held-out ones.
        continuations: M of eq. 24.
        category_temperature: Z_T of the K = 4 drafter in Figure 1.
        rejection_anchors: every how many anchors rejections are counted.
    """

    oracle_prefixes: int = 96
    oracle_continuations: int = 128
    setting: str = "medium"
    task: str = "creative"
    training_tasks: tuple[str, ...] | None = None
    training_prompts: int = 1024
    points: int = 512
    continuations: int = 20
    category_temperature: float = 1.0
    rejection_anchors: int = 1
    seed: int = 0


@dataclass(frozen=True)
class Plan:
    """Everything about one target in one profile.

    Attributes:
        target: "tiny", "smollm2", a folder or a Hugging Face id.
        label: the target's name in tables.
        variants: fine-tuned from the pre-trained drafter, each with every seed.
        seeds: fine-tuning seeds (category heads and data order).
        parallel: variants trained side by side on a CPU, one thread each.
        pretrain: how the drafter that all variants start from is trained; of a shipped one, how it was.
        pretrain_data: what it is trained on, if not ``data``.
        diagnosis: sizes of notebook 01's measurements.
    """

    target: str
    label: str
    data: DataConfig
    drafter: DrafterConfig
    pretrain: TrainingConfig
    finetune: TrainingConfig
    variants: tuple[Variant, ...] = MAIN
    seeds: tuple[int, ...] = (0,)
    category_temperatures: tuple[float, ...] = CATEGORY_TEMPERATURES
    precision: str = "float32"
    parallel: bool = True
    tiny: TinyTargetConfig | None = None
    pretrain_data: DataConfig | None = None
    diagnosis: DiagnosisConfig = DiagnosisConfig()

    def check(self) -> None:
        """Refuse a plan that cannot work, before anything expensive starts.

        Raises:
            DBlastError: a value of another type, NaN or infinite; a count or seed out of range; nothing to train or
                score; an unknown task, setting or precision; prompts that cannot be read.
        """
        check_fields(self)
        shape, diagnosis = self.drafter, self.diagnosis
        check_whole("block length b", shape.block_length, 1)
        check_whole("number of draft layers", shape.layers, 1)
        check_whole("draft_vocabulary", shape.draft_vocabulary, 0)
        for name in ("taps", "start_layers"):
            for layer in getattr(shape, name) or ():
                check_whole(f"{name}: a target layer", layer, 0)
        if shape.mask_token_id is not None:
            check_whole("mask_token_id", shape.mask_token_id, 0)
        for name in ("label", "target"):
            if not getattr(self, name).strip():
                raise DBlastError(f"{name} is empty; give the target a name")
        if Path(self.label).name != self.label:
            raise DBlastError(f"label {self.label!r} must be usable as part of a file's name")
        for name in ("variants", "seeds", "category_temperatures"):
            if not getattr(self, name):
                raise DBlastError(f"{name} is empty; give at least one")
        for variant in self.variants:
            check_whole("number of categories K", variant.K, 1)
            self.finetune_config(variant, 0)
        for value in (*self.category_temperatures, diagnosis.category_temperature):
            if not value >= 0:
                raise DBlastError(f"category temperature must not be negative, got {value}")
        if self.precision not in PRECISIONS:
            raise DBlastError(f"precision must be one of {', '.join(PRECISIONS)}, got {self.precision!r}")
        parts = [*self.seeds, self.data.seed, shape.seed, diagnosis.seed]
        if self.tiny is not None:
            check_whole("steps of the tiny target", self.tiny.steps, 1)
            check_whole("batch_size of the tiny target", self.tiny.batch_size, 1)
            if not self.tiny.learning_rate > 0:
                raise DBlastError(f"learning_rate of the tiny target must be positive, got {self.tiny.learning_rate}")
            parts.append(self.tiny.seed)
        for seed in parts:
            if not 0 <= seed <= LARGEST_SEED:
                raise DBlastError(f"a seed must lie in 0..{LARGEST_SEED}, got {seed}")
        for data in (self.data, self.pretrain_data):
            if data is not None:
                _check_data(data)
        for name in ("oracle_prefixes", "training_prompts", "points", "continuations", "rejection_anchors"):
            check_whole(name, getattr(diagnosis, name), 1)
        check_whole("oracle_continuations", diagnosis.oracle_continuations, 2)
        get_setting(diagnosis.setting)

    def figure1(self) -> Plan:
        """The plan of Figure 1's drafters: K = 1 with NLL and K = 4 with AL, fine-tuned on text of one task and setting."""
        d = self.diagnosis
        tasks = d.training_tasks or (d.task,)
        data = replace(
            self.data, tasks=tasks, training_setting=d.setting, training_prompts=d.training_prompts, settings=(d.setting,)
        )
        return replace(
            self,
            data=data,
            pretrain_data=self.pretrain_data or self.data,
            variants=FIGURE1,
            category_temperatures=(d.category_temperature,),
        )

    def finetune_config(self, variant: Variant, seed: int) -> TrainingConfig:
        """The fine-tuning configuration of one variant and seed."""
        return replace(self.finetune, loss=variant.loss, construction=variant.construction, seed=seed)


def _check_data(data: DataConfig) -> None:
    for name in ("training_prompts", "training_tokens", "evaluation_tokens", "batch_size"):
        check_whole(name, getattr(data, name), 1)
    check_whole("evaluation_per_task", data.evaluation_per_task, 1 if data.prompts == "synthetic" else 0)
    if not 0 < data.calibration_fraction < 1:
        raise DBlastError(f"calibration_fraction must lie strictly between 0 and 1, got {data.calibration_fraction}")
    if not 0 <= data.seed <= LARGEST_SEED:
        raise DBlastError(f"a seed must lie in 0..{LARGEST_SEED}, got {data.seed}")
    for name in (*data.settings, data.training_setting):
        get_setting(name)
    if data.training_setting not in data.settings:
        raise DBlastError(f"the training setting {data.training_setting!r} must be one of the evaluation settings")
    if data.prompts == "synthetic":
        unknown = set(data.tasks or ()) - set(KINDS)
        if unknown:
            raise DBlastError(f"unknown task {sorted(unknown)[0]!r}; the tasks are {', '.join(KINDS)}")
    elif data.prompts != "hub" and not data.prompts.startswith("own:"):
        load_prompts(data.prompts, data.tasks)


@dataclass(frozen=True)
class Profile:
    """A named set of plans.

    Attributes:
        minutes: how long a run took on two cores (None: not measured).
        notebooks: the numbers of those that a batch run executes.
    """

    name: str
    plans: tuple[Plan, ...]
    minutes: float | None = None
    notebooks: tuple[str, ...] = ("01", "02", "03", "04", "05")

    def plan(self, label: str) -> Plan:
        """The plan of one target; DBlastError lists the targets there are."""
        for plan in self.plans:
            if plan.label == label:
                return plan
        known = ", ".join(plan.label for plan in self.plans)
        raise DBlastError(f"profile {self.name!r} has no target {label!r}; its targets: {known}")
