"""What every section of the configuration shares: closed, immutable, finite numbers, described fields."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """One concern of the configuration. Unknown keys are refused; a loaded section does not change."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        allow_inf_nan=False,
        validate_default=True,
        use_attribute_docstrings=False,
        protected_namespaces=(),
    )
