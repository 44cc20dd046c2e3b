"""What a reproduction run is made of: variants, plans of one target, profiles of several plans."""

from __future__ import annotations

from dataclasses import dataclass, replace

from dblast.errors import DBlastError
from dblast.reproduction import objectives  # noqa: F401  (adds the losses of other papers to dblast.losses.LOSSES)
from dblast.reproduction.language.synthetic import KINDS
from dblast.reproduction.prompts.sources import load_prompts
from dblast.sampling import get_setting
from dblast.training import TrainingConfig

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
            DBlastError: block length or K below 1, a count below 1, an unknown
                task or setting, or prompts that cannot be read.
        """
        data = self.data
        if self.drafter.block_length < 1:
            raise DBlastError(f"block length b must be at least 1, got {self.drafter.block_length}")
        if self.drafter.layers < 1:
            raise DBlastError(f"number of draft layers must be at least 1, got {self.drafter.layers}")
        for variant in self.variants:
            if variant.K < 1:
                raise DBlastError(f"number of categories K must be at least 1, got {variant.K}")
            self.finetune_config(variant, 0)
        for name in ("training_prompts", "training_tokens", "evaluation_tokens", "batch_size"):
            if getattr(data, name) < 1:
                raise DBlastError(f"{name} must be at least 1, got {getattr(data, name)}")
        for name in (*data.settings, data.training_setting):
            get_setting(name)
        if data.training_setting not in data.settings:
            raise DBlastError(f"the training setting {data.training_setting!r} must be one of the evaluation settings")
        for value in self.category_temperatures:
            if value < 0:
                raise DBlastError(f"category temperature must not be negative, got {value}")
        if data.prompts == "synthetic":
            unknown = set(data.tasks or ()) - set(KINDS)
            if unknown:
                raise DBlastError(f"unknown task {sorted(unknown)[0]!r}; the tasks are {', '.join(KINDS)}")
        elif data.prompts != "hub" and not data.prompts.startswith("own:"):
            load_prompts(data.prompts, data.tasks)
        diagnosis = self.diagnosis
        get_setting(diagnosis.setting)
        for name in ("oracle_prefixes", "training_prompts", "points", "continuations", "rejection_anchors"):
            if getattr(diagnosis, name) < 1:
                raise DBlastError(f"{name} must be at least 1, got {getattr(diagnosis, name)}")
        if diagnosis.oracle_continuations < 2:
            raise DBlastError(f"oracle_continuations must be at least 2, got {diagnosis.oracle_continuations}")

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
