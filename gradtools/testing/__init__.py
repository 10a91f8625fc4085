"""Defines checks of derivatives, and of ports from PyTorch to JAX, for users' tests.

The names of this package are imported lazily, and a framework is imported only when a check uses
it.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gradtools.errors import DerivativeError as DerivativeError
    from gradtools.testing.checked_mode import CheckedReport as CheckedReport
    from gradtools.testing.checked_mode import checked as checked
    from gradtools.testing.checking.derivative_checks import check_derivatives as check_derivatives
    from gradtools.testing.checking.rule_checks import check_rule as check_rule
    from gradtools.testing.cross_checking.compare import cross_check as cross_check
    from gradtools.testing.cross_checking.tolerances import tolerance as tolerance
    from gradtools.testing.diverging.divergence import Divergence as Divergence
    from gradtools.testing.diverging.divergence import first_divergence as first_divergence
    from gradtools.testing.matching_parameters.mapping import Layout as Layout
    from gradtools.testing.matching_parameters.mapping import ParameterMapping as ParameterMapping
    from gradtools.testing.matching_parameters.parameter_matching import (
        match_parameters as match_parameters,
    )
    from gradtools.testing.report import AgreementError as AgreementError
    from gradtools.testing.report import Comparison as Comparison
    from gradtools.testing.report import Report as Report

_HOMES = {
    "checked": "checked_mode",
    "CheckedReport": "checked_mode",
    "DerivativeError": "checked_mode",
    "check_derivatives": "checking.derivative_checks",
    "check_rule": "checking.rule_checks",
    "cross_check": "cross_checking.compare",
    "Divergence": "diverging.divergence",
    "first_divergence": "diverging.divergence",
    "Layout": "matching_parameters.mapping",
    "ParameterMapping": "matching_parameters.mapping",
    "match_parameters": "matching_parameters.parameter_matching",
    "AgreementError": "report",
    "Comparison": "report",
    "Report": "report",
    "tolerance": "cross_checking.tolerances",
}
__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOMES[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted(__all__)
