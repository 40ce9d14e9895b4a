"""The regular expressions of a config, and what they match.

A regular expression can run for ever, and those in use need look-aheads, so no linear engine takes
them. So nothing is matched here: a ``Matcher`` answers for all expressions at once, from a process
that is killed after a bound (``registry_service.matching``), and the pure checks take the answer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

from registry_service.domain.catalog import Catalog
from registry_service.domain.peft_config import LoraConfig
from registry_service.domain.peft_fields import Expression
from registry_service.domain.rewrites import probed_names

# For each expression the names that it matches from end to end (``re.fullmatch``).
Matches = Mapping[str, frozenset[str]]
Matcher = Callable[[Sequence[str], Sequence[str]], Matches]

NO_MATCHES: Final[Matches] = {}


def expressions_of(config: LoraConfig) -> tuple[str, ...]:
    """All expressions that have to be matched for ``config``, each once."""
    found = [
        option.text
        for option in (config.target_modules, config.exclude_modules)
        if isinstance(option, Expression)
    ]
    for key, _ in (*config.rank_pattern, *config.alpha_pattern):
        if isinstance(key, Expression):
            # By itself too: a key that is no expression alone would mean something else inside.
            found += [key.text, pattern_expression(key)]
    return tuple(dict.fromkeys(found))


def pattern_expression(key: Expression) -> str:
    """What PEFT makes of a key of ``rank_pattern`` or ``alpha_pattern``."""
    return rf"(.*\.)?({key.text})"


def names_of(catalog: Catalog, config: LoraConfig) -> tuple[str, ...]:
    """The names that the expressions of ``config`` are asked about: modules, parameters where the
    config targets those, and what PEFT would ask about besides.
    """
    names = [module.name for module in catalog.modules]
    if config.target_parameters:
        names += [f"{m.name}.{parameter}" for m in catalog.modules for parameter in m.parameters]
    return tuple(dict.fromkeys((*names, *probed_names(catalog))))


def matches_of(catalog: Catalog, config: LoraConfig, matcher: Matcher) -> Matches:
    """What every expression of ``config`` matches in ``catalog``.

    Raises:
        MalformedError: an expression that does not compile, or does not end within its bound.
        UnavailableError: a fault of ours.
    """
    expressions = expressions_of(config)
    return matcher(expressions, names_of(catalog, config)) if expressions else NO_MATCHES
