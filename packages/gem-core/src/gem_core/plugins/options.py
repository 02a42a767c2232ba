"""Validating mappings of options against pydantic models, with the nearest name for an unknown key."""

import inspect
import json
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from gem_core.plugins.nearest import nearest
from gem_core.spec import RequestError

if TYPE_CHECKING:
    from pydantic import BaseModel

ModelT = TypeVar("ModelT", bound="BaseModel")


def parse(model: type[ModelT], values: Mapping[str, Any], where: str) -> ModelT:
    """Validate ``values`` strictly: no unknown key, and no bool, string or float where an int is meant.

    Args:
        model: the pydantic model; one that does not say ``extra = "allow"`` accepts no other keys.
        values: plain TOML values.
        where: dotted path that messages begin with.

    Raises:
        RequestError: names the path, the value and what is accepted; the nearest key is offered for an unknown one.
    """
    from pydantic import ValidationError

    _check_keys(model, values, where)
    try:
        # JSON mode is strict about scalars and still takes a list for a tuple and a string for an enum or a path
        parsed = model.model_validate_json(json.dumps(values, default=str), strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        path = ".".join([where, *map(str, first["loc"])]) if where else ".".join(map(str, first["loc"]))
        given = f"{first['input']!r} is not accepted" if first["type"] != "missing" else "it is missing"
        raise RequestError(path, given, f"{first['msg']}.") from error
    _check_inside(parsed, values, where)
    return parsed


def _check_keys(model: type["BaseModel"], values: Mapping[str, Any], where: str) -> None:
    """Refuse unknown keys of a model and of models directly inside it, before anything else is said about the values."""
    from pydantic import BaseModel

    for key, value in values.items():
        path = f"{where}.{key}" if where else key
        if key in model.model_fields:
            annotation = model.model_fields[key].annotation
            if inspect.isclass(annotation) and issubclass(annotation, BaseModel) and isinstance(value, Mapping):
                _check_keys(annotation, value, path)
        elif model.model_config.get("extra") != "allow":
            raise RequestError(path, "there is no such key", nearest(key, model.model_fields))


def _check_inside(parsed: Any, value: Any, where: str) -> None:
    """Refuse unknown keys of models in lists, tables and unions, whose class is known only after validation."""
    from pydantic import BaseModel

    if isinstance(parsed, BaseModel) and isinstance(value, Mapping):
        _check_keys(type(parsed), value, where)
        pairs = [(key, getattr(parsed, key), item) for key, item in value.items() if key in type(parsed).model_fields]
    elif isinstance(parsed, Mapping) and isinstance(value, Mapping):
        pairs = [(key, parsed[key], item) for key, item in value.items() if key in parsed]
    elif isinstance(parsed, list | tuple) and isinstance(value, list):
        pairs = [(str(i), *both) for i, both in enumerate(zip(parsed, value, strict=False))]
    else:
        return
    for key, inner, item in pairs:
        _check_inside(inner, item, f"{where}.{key}" if where else key)


def as_keywords(name: str, implementation: Callable[..., Any], options: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """Options as keyword arguments; where no model has checked them, the signature of the implementation does.

    Args:
        name: the declaration's name, for messages.
        implementation: what will be called.
        options: an instance of a pydantic model, or a mapping.
        given: the other keyword arguments of the call.

    Raises:
        RequestError: the implementation takes no such option; the nearest is offered.
    """
    if not isinstance(options, dict):
        return {field: getattr(options, field) for field in type(options).model_fields}
    parameters = inspect.signature(implementation).parameters.values()
    if not any(p.kind is p.VAR_KEYWORD for p in parameters):
        known = [p.name for p in parameters if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD) and p.name not in given]
        for key in options:
            if key not in known:
                raise RequestError(f"option {key!r} of {name!r}", "there is no such option", nearest(key, known))
    return options
