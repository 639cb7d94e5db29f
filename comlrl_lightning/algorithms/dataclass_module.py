"""Lightning modules whose settings are dataclass fields: one declaration for Python, type checkers and YAML."""

# No `from __future__ import annotations` here and in the modules of the algorithms: the command line validates settings
# by their types, which it cannot resolve from texts over several files.

from dataclasses import dataclass, field, fields
from typing import Any, Self, dataclass_transform

from lightning.pytorch import LightningModule

from comlrl_lightning.keywords import KnownKeywords, check_keywords
from comlrl_lightning.utilities.documentation import FieldDocumentation

FIELDS = "__dataclass_fields__"
"""Where a dataclass keeps its fields, by name."""


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

    def __setattr__(self, name: str, value: Any) -> None:
        """Keep settings as they are: a torch module among them is no part of this one, neither moved nor saved."""
        if name in getattr(type(self), FIELDS, ()):
            object.__setattr__(self, name, value)
        else:
            super().__setattr__(name, value)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        inherited = getattr(cls, FIELDS, {})
        for name in [name for name in vars(cls) if name in inherited]:
            # A new default without an annotation is a default all the same.
            cls.__annotations__.setdefault(name, inherited[name].type)
        dataclass(eq=False, repr=False, kw_only=True)(cls)
        cls.__doc__ = FieldDocumentation(cls.__dict__.get("__doc__") or "")  # type: ignore[assignment]

    def settings(self) -> dict[str, Any]:
        """Settings by name, as they are now."""
        return {one.name: getattr(self, one.name) for one in fields(self) if one.init}  # type: ignore[arg-type]
