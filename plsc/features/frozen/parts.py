"""Weights of the backbone that are not trained, in the whole run or in some of its stages.

What is frozen in every stage requires no gradient: no engine computes, sends or stores one. What freezes or thaws
during the run stays in the engine's hands, which has wrapped it once: DDP waits for the gradient of every weight that
it was given, FSDP has sharded it. Its gradients are dropped before the step, so that the optimizer passes it by and
keeps its state. Where no weight at all is trained, there is no backward pass through the backbone.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import Tensor, nn

from plsc.config import Config, stage_configs
from plsc.features.frozen.config import FrozenConfig
from plsc.optim.parameter_groups import fitting, last_given
from plsc.parallel.strategies import Strategy


@dataclass(frozen=True)
class FrozenNames:
    """The weights that a configuration freezes, and the modules whose running statistics stay, by their names.

    ``is_whole`` says that no weight is left to train.
    """

    weights: frozenset[str]
    modules: frozenset[str]
    is_whole: bool


def frozen_names(config: Config, backbone: nn.Module) -> FrozenNames:
    """Find what ``frozen`` and the groups of [optim.groups] freeze in the whole backbone.

    Raises:
        UsageError: a pattern fits no weight.
    """
    weights = dict(backbone.named_parameters())
    groups = [(table.name, table.values) for table in config.optim.groups]
    given = config.section(FrozenConfig).weights
    names = fitting(given, list(weights), "frozen")
    names |= {name for name in weights if last_given("frozen", name, groups, False)}
    patterns = [*given, *(name for name, values in groups if values.get("frozen"))]
    modules = {name for name, module in _with_statistics(backbone) if _is_frozen(name, module, names, patterns)}
    trained = {name for name, weight in weights.items() if weight.requires_grad}
    return FrozenNames(frozenset(names), frozenset(modules), trained <= names)


def frozen_for_good(stages: Sequence[FrozenNames]) -> set[str]:
    """The weights that are frozen in every stage; none where that is all of them: engines need some to train."""
    if all(names.is_whole for names in stages):
        return set()
    return set(frozenset.intersection(*(names.weights for names in stages)))


def freeze_for_good(config: Config, backbone: nn.Module) -> list[FrozenNames]:
    """Let what every stage freezes require no gradient; returns what each of them does."""
    found = [frozen_names(each, backbone) for each in stage_configs(config)]
    for name in frozen_for_good(found):
        backbone.get_parameter(name).requires_grad_(False)
    return found


class FrozenParts:
    """What a rank holds of the frozen parts of a backbone; :meth:`hold` follows whatever sets the backbone's mode.

    Args:
        names: of what is frozen now.
        strategy: of the backbone as it is trained on this rank.

    Attributes:
        weights: those that are frozen, or this rank's parts of them, whose gradients are dropped before the update.
        trains_head_alone: the backbone needs no backward pass; engines with passes of their own make it all the same.
    """

    def __init__(self, names: FrozenNames, strategy: Strategy) -> None:
        self.names = names
        self.weights = [weight.parameter for weight in strategy.weights if weight.name in names.weights]
        self.trains_head_alone = names.is_whole and not strategy.has_own_passes
        held = dict(_with_statistics(strategy.backbone))
        self._modules = [module for name, module in held.items() if name in names.modules]
        self._others = [module for name, module in held.items() if name not in names.modules]
        self.hold()

    def hold(self) -> None:
        """Let frozen batch normalisation apply its statistics instead of moving them, and the others move theirs."""
        for module in self._others:
            module.training = True
        for module in self._modules:
            module.training = False


def _with_statistics(backbone: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for name, module in backbone.named_modules():
        if isinstance(getattr(module, "running_mean", None), Tensor):
            yield name, module


def _is_frozen(name: str, module: nn.Module, frozen: set[str], patterns: list[str]) -> bool:
    """Return whether a module's statistics stay: its trained weights are all frozen, or, if it has none, they are."""
    prefix = f"{name}." if name else ""
    trained = [prefix + weight for weight, value in module.named_parameters(recurse=False) if value.requires_grad]
    if trained:
        return frozen.issuperset(trained)
    return any(fnmatchcase(f"{prefix}running_mean", pattern) for pattern in patterns)
