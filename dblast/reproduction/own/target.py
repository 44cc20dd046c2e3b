"""A drafter for one's own target, from prompts to a folder with weights and a report: ``python -m dblast drafter``.

Everything that can be seen to be wrong is refused before the first token is sampled. Stages are those of
:mod:`dblast.reproduction.experiments`, so a killed run goes on where it was.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dblast.errors import DBlastError
from dblast.reproduction.names import AL_CONSTRUCTIONS, LOSSES, OBJECTIVES, SETTINGS, STARTS, TABLE_FILES
from dblast.reproduction.own.requirements import check_cache, check_numbers, check_output

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from dblast.backbone import DBlastConfig
    from dblast.reproduction.plans import Plan
    from dblast.targets import Target

#: Tokens that a drafter proposes by default: more cover hardly more of the text, and make its head slower.
DRAFT_VOCABULARY = 8192
#: Draft layers and tapped target layers, where the target has as many.
LAYERS, TAPS = 3, 5


@dataclass(frozen=True)
class Request:
    """What the command line asks for; None where the default depends on the target.

    Attributes:
        prompts, train_prompts: JSONL files, ``data set:column``, or "bundled".
        start: one of :data:`dblast.reproduction.names.STARTS`, or a saved drafter or DFlash checkpoint.
        training_setting: sampling setting of the text that fine-tuning reads.
        draft_vocabulary: tokens the drafter may propose; 0 for all.
    """

    target: str
    prompts: str = "bundled"
    train_prompts: str | None = None
    start: str | None = None
    hours: float = 2.0
    categories: int = 4
    loss: str = "AL"
    construction: str = "all_prefixes"
    training_setting: str = "low"
    block_length: int | None = None
    layers: int | None = None
    draft_vocabulary: int | None = None
    mask_token_id: int | None = None
    response_tokens: int | None = None
    chat_options: dict[str, Any] | None = None
    seed: int = 0

    @property
    def is_given(self) -> bool:
        """Whether the drafter starts from a trained one."""
        return self.start == "shipped" or self.start is not None and self.start not in STARTS


def check_request(request: Request, out: Path) -> None:
    """Refuse what needs no model to be seen.

    Raises:
        DBlastError: see above.
    """
    from dblast.reproduction.demo import check_model_name, check_target_name

    check_output(out)
    check_numbers(
        hours=request.hours,
        categories=request.categories,
        block_length=request.block_length,
        layers=request.layers,
        response_tokens=request.response_tokens,
        seed=request.seed,
    )
    if request.draft_vocabulary is not None and request.draft_vocabulary < 0:
        raise DBlastError(
            f"--draft-vocabulary must be a number of tokens, or 0 for all, got {request.draft_vocabulary}"
        )
    if request.mask_token_id is not None and request.mask_token_id < 0:
        raise DBlastError(f"--mask-token-id must not be negative, got {request.mask_token_id}")
    for option, value, known in (
        ("--loss", request.loss, LOSSES + OBJECTIVES),
        ("--construction", request.construction, AL_CONSTRUCTIONS),
        ("--training-setting", request.training_setting, SETTINGS),
    ):
        if value not in known:
            raise DBlastError(f"unknown {option} {value!r}; known: {', '.join(known)}")
    check_target_name(request.target)
    if request.start is not None and request.start not in STARTS:
        check_model_name(
            request.start, f"--start takes a drafter's folder or id, or {', '.join(STARTS)}", prefix="--start: "
        )
    check_prompt_source("--prompts", request.prompts)
    if request.train_prompts is not None:
        check_prompt_source("--train-prompts", request.train_prompts)
    check_cache()


def check_prompt_source(option: str, source: str) -> None:
    """Refuse prompts that are neither a file nor look like a data set's column, and a file with a line that is none."""
    path, table = Path(source), Path(source.rpartition(":")[0])
    if path.is_dir() or path.is_file() and path.suffix in TABLE_FILES[:-1]:
        raise DBlastError(f"{option}: {source!r} holds a table; name a column of it, as in '{source}:text'")
    if path.is_file():
        from dblast.reproduction.prompts.sources import read_prompts

        read_prompts(path)
    elif table.suffix in TABLE_FILES and not table.is_file():
        raise DBlastError(f"{option}: no such file {str(table)!r}")
    elif source != "bundled" and ":" not in source:
        raise DBlastError(f"{option}: no such file {source!r}; give a JSONL file, owner/name:column or bundled")


# -- what the target decides -----------------------------------------------------------------------


@dataclass
class Prepared:
    """A request that can be run.

    Attributes:
        plan: without sizes.
        target: loaded.
        notes: lines that say what was chosen.
        key: what the sizes belong to.
    """

    plan: Plan
    target: Target
    notes: list[str] = field(default_factory=list)
    key: dict = field(default_factory=dict)


def _start_config(start: str, target: PreTrainedConfig) -> DBlastConfig:
    """Configuration of the drafter to start from, which must be of this target; its weights are not read.

    Raises:
        DBlastError: it is none, has category heads, or is of another target.
    """
    from dblast.reproduction.own.pairs import check_fits, read_drafter_config

    config = read_drafter_config(start)
    check_fits(config, target, f"--start {start}")
    if config.num_categories:
        raise DBlastError(f"--start {start} has category heads already; start from a drafter without, or leave it out")
    return config


def _base_plan(request: Request, config: PreTrainedConfig) -> Plan:
    """The plan of a request before its prompts and sizes; the recipe is that of the shipped drafter."""
    from dblast.backbone import default_taps
    from dblast.reproduction.plans import DataConfig, DrafterConfig, Variant
    from dblast.reproduction.profiles import SMOLLM2

    depth = config.num_hidden_layers
    response = request.response_tokens or min(
        128, max(8, (getattr(config, "max_position_embeddings", None) or 512) // 2)
    )
    if request.is_given:
        start = _start_config(request.start, config)
        for option, given, own in (
            ("--block-length", request.block_length, start.block_length),
            ("--layers", request.layers, start.num_hidden_layers),
            ("--draft-vocabulary", request.draft_vocabulary, start.draft_vocab_size),
            ("--mask-token-id", request.mask_token_id, start.mask_token_id),
        ):
            if given is not None and given != own:
                raise DBlastError(f"--start {request.start} has {option} {own}, not {given}; leave the option out")
        shape = DrafterConfig(
            layers=start.num_hidden_layers,
            taps=tuple(start.target_layer_ids),
            block_length=start.block_length,
            draft_vocabulary=start.draft_vocab_size,
            start=request.start,
            mask_token_id=start.mask_token_id,
            seed=request.seed,
        )
    else:
        layers = request.layers or min(LAYERS, depth)
        if layers > depth and request.start != "random":
            raise DBlastError(
                f"--layers {layers}: the target has {depth} layers to start from; lower it, or add --start random"
            )
        vocabulary = DRAFT_VOCABULARY if request.draft_vocabulary is None else request.draft_vocabulary
        shape = DrafterConfig(
            layers=layers,
            taps=tuple(default_taps(depth, max(1, min(TAPS, depth - 1)))),
            block_length=request.block_length or 7,
            draft_vocabulary=vocabulary if vocabulary < config.vocab_size else 0,
            start=request.start or "target",
            mask_token_id=request.mask_token_id,
            seed=request.seed,
        )
    if shape.block_length >= response:
        raise DBlastError(
            f"--block-length {shape.block_length} leaves no room in answers of {response} tokens; lower it"
        )
    return replace(
        SMOLLM2,
        target=request.target,
        label=Path(request.target).name or request.target,
        data=DataConfig(
            training_setting=request.training_setting,
            training_tokens=response,
            evaluation_tokens=response,
            batch_size=64,
            seed=request.seed,
        ),
        drafter=shape,
        pretrain=replace(SMOLLM2.pretrain, seed=request.seed),
        variants=(Variant(request.categories, request.loss, request.construction),),
        seeds=(request.seed,),
        pretrain_data=None,
        parallel=False,
    )


def _prompts(request: Request, target: Target, tokens: int) -> tuple[str, list[str]]:
    """Read, split, encode and keep the prompts; their name for the plan, and what was done."""
    from dblast.reproduction.prompts import own
    from dblast.reproduction.prompts.sources import load_prompts, training_prompts

    notes = []
    if request.prompts == "bundled":
        evaluation = load_prompts("bundled")
        training = training_prompts(4096, request.seed) if request.train_prompts is None else []
    elif request.train_prompts is None:
        evaluation, training = own.divide(own.read_source(request.prompts), request.prompts, request.seed)
        notes.append(f"{request.prompts} is split: {len(evaluation)} prompts evaluate, {len(training)} train")
    else:
        read = own.read_source(request.prompts)
        evaluation, training = own.without_repeats(read), []
        if len(evaluation) < len(read):
            notes.append(f"{len(read) - len(evaluation)} prompts of {request.prompts} repeat others and are left out")
        own.check_enough(evaluation, request.prompts)
        evaluation = own.shuffled(evaluation, request.seed)
    if request.train_prompts is not None:
        source = request.train_prompts
        read = training_prompts(4096, request.seed) if source == "bundled" else own.read_source(source)
        training = own.shuffled(own.without_repeats(read, evaluation), request.seed)
        if not training:
            raise DBlastError(f"every prompt of {source} is an evaluation prompt too; give --train-prompts others")
        if len(training) < len(read):
            notes.append(
                f"{len(read) - len(training)} prompts of {source} repeat others or evaluation prompts and are left out"
            )
    if target.tokenizer.chat_template is None and not all(prompt.raw for prompt in (*evaluation, *training)):
        notes.append("the target has no chat template: turns stand as plain text")
    encoded = [own.encode_own(rows, target, tokens, "--response-tokens") for rows in (evaluation, training)]
    # Two texts may be the same to the tokenizer.
    taken = {prompt.ids for prompt in encoded[0]}
    encoded[1] = [prompt for prompt in encoded[1] if prompt.ids not in taken]
    if not encoded[1]:
        raise DBlastError("no training prompt differs from the evaluation prompts; give other ones")
    return own.keep(*encoded), notes


def prepare(request: Request) -> Prepared:
    """Load the target, read the prompts, and check everything against each other and the machine.

    Raises:
        DBlastError: what cannot work, with the option to change.
    """
    import torch

    from dblast.backbone import DBlastConfig
    from dblast.reproduction.experiments import default_device
    from dblast.reproduction.initialise import start_drafter
    from dblast.reproduction.own.pairs import read_drafter_config, read_target_config
    from dblast.reproduction.own.requirements import check_memory
    from dblast.reproduction.prompts.own import open_own
    from dblast.targets import CHAT_OPTIONS, load_target, propose_mask_token

    if request.target == "smollm2" and request.start is None:
        request = replace(request, start="shipped")
    notes: list[str] = []
    remembered: dict[str, Any] = {}
    if request.is_given:
        remembered = read_drafter_config(request.start).chat_options or {}
    if request.target == "smollm2":
        if request.start != "shipped" and request.is_given:
            _start_config(request.start, read_target_config("smollm2"))
    else:
        # The configuration alone tells most of what can be wrong, before gigabytes are read or downloaded.
        config = read_target_config(request.target)
        plan = _checked(_base_plan(request, config))
        check_memory(plan, config, plan.data.training_tokens)
    target = load_target(
        request.target,
        dtype=torch.bfloat16,
        device=default_device(),
        mask_token_id=request.mask_token_id,
        chat_options=CHAT_OPTIONS | remembered | (request.chat_options or {}),
    )
    config = target.model.config
    plan = _checked(_base_plan(request, config))
    mask = plan.drafter.mask_token_id if plan.drafter.mask_token_id is not None else target.mask_token_id
    if mask is None:
        mask = propose_mask_token(target.tokenizer, config.vocab_size)
        if mask is None:
            raise DBlastError(
                "no token of this target is known to be unused; give --mask-token-id one that it never writes"
            )
        word = target.tokenizer.convert_ids_to_tokens(mask)
        notes.append(f"mask token: {mask} ({word or 'a row that no token uses'}); --mask-token-id chooses another")
    plan = replace(plan, drafter=replace(plan.drafter, mask_token_id=mask))
    target.mask_token_id = mask
    if request.is_given:
        start_drafter(plan.drafter, target, [], list(plan.drafter.taps))
    else:
        DBlastConfig.for_target(
            target,
            num_layers=plan.drafter.layers,
            block_length=plan.drafter.block_length,
            target_layer_ids=plan.drafter.taps,
        )
    name, more = _prompts(request, target, plan.data.training_tokens)
    notes += more
    plan = replace(plan, data=replace(plan.data, prompts=name))
    longest = max(len(p.ids) for split in ("evaluation", "training") for p in open_own(name, split))
    check_memory(plan, config, longest + plan.data.training_tokens)
    return Prepared(plan, target, notes, _key(plan, request))


def _key(plan: Plan, request: Request) -> dict:
    """What a run's sizes belong to: target and start by their content, prompts by theirs, wherever they lie."""
    from dblast.reproduction.identity import model_identity

    values = asdict(plan) | {"target": model_identity(request.target), "label": ""}
    values.pop("diagnosis")
    if request.is_given and request.start != "shipped":
        values["drafter"] |= {"start": model_identity(request.start)}
    return {"plan": values, "hours": request.hours}


def _checked(plan: Plan) -> Plan:
    """The plan, with its checks in the words of the command line."""
    plan.check()
    return plan


def parse_chat_options(given: list[str] | None, enable_thinking: bool | None) -> dict[str, Any] | None:
    """``NAME=VALUE`` options of a chat template; values are JSON where they can be, else text. None: nothing was given.

    Raises:
        DBlastError: no "=" in an option.
    """
    if not given and enable_thinking is None:
        return None
    options: dict[str, Any] = {} if enable_thinking is None else {"enable_thinking": enable_thinking}
    for item in given or []:
        name, separator, value = item.partition("=")
        if not separator or not name:
            raise DBlastError(f"--chat-option {item!r} is not of the form NAME=VALUE")
        try:
            options[name] = json.loads(value)
        except ValueError:
            options[name] = value
    return options
