"""Lightning modules whose settings are dataclass fields: one declaration for Python, type checkers and YAML."""

# No `from __future__ import annotations` here and in the modules of the algorithms: the command line validates settings
# by their types, which it cannot resolve from texts over several files.

from dataclasses import dataclass, field, fields
from typing import Any, Self, dataclass_transform

from lightning.pytorch import LightningModule

from comlrl_lightning.keywords import KnownKeywords, check_keywords
from comlrl_lightning.utilities.documentation import FieldDocumentation


@dataclass_transform(kw_only_default=True, eq_default=False, field_specifiers=(field,))
class DataclassModule(LightningModule, KnownKeywords):
    """A LightningModule whose subclasses are dataclasses, without a decorator.

    Annotated class attributes are settings: arguments of the constructor, by keyword unless declared otherwise. What a
    module computes from them is set in `__post_init__`.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Refuse unknown settings with the name that may have been meant, and let fields be set before `__init__`."""
        check_keywords(cls, kwargs)
        module = super().__new__(cls)
        LightningModule.__init__(module)
        return module

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        dataclass(eq=False, repr=False, kw_only=True)(cls)
        cls.__doc__ = FieldDocumentation(cls.__dict__.get("__doc__") or "")  # type: ignore[assignment]

    def settings(self) -> dict[str, Any]:
        """Settings by name, as they are now."""
        return {one.name: getattr(self, one.name) for one in fields(self) if one.init}  # type: ignore[arg-type]
