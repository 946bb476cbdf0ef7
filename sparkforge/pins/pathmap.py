"""Where a file of the repository is found in the release wheel, and the way back."""

from __future__ import annotations

from collections.abc import Iterable

from sparkforge.pins.types import Model, Place


class PathRule(Model):
    """Where files of the repository are found in the release wheel."""

    repo: Place
    """Prefix in the repository, with its trailing slash; where ``build`` is set, a file, too."""
    wheel: Place | None
    """Prefix in the wheel; null: files that no wheel ships and none needs (tests, docs)."""
    build: bool = False
    """Build rules: a change of them affects a compile only, never an overlay."""


def rule_of(rules: Iterable[PathRule], path: str) -> PathRule | None:
    """Return the rule that a path of the repository falls under: the longest; None: no rule."""
    fitting = [
        rule
        for rule in rules
        if path == rule.repo or (rule.repo.endswith("/") and path.startswith(rule.repo))
    ]
    return max(fitting, key=lambda rule: len(rule.repo), default=None)


def member_of(rules: Iterable[PathRule], path: str) -> str | None:
    """Return where a wheel has a file of the repository; None: it ships none, or no rule says."""
    rule = rule_of(rules, path)
    if rule is None or rule.wheel is None:
        return None
    return rule.wheel + path[len(rule.repo) :]


def origin_of(rules: Iterable[PathRule], member: str) -> tuple[PathRule, str] | None:
    """Return where a wheel's member is from: the longest rule and the path; None: no rule says."""
    fitting = [(rule.wheel, rule) for rule in rules if rule.wheel and member.startswith(rule.wheel)]
    if not fitting:
        return None
    prefix, rule = max(fitting, key=lambda pair: len(pair[0]))
    return rule, rule.repo + member[len(prefix) :]
