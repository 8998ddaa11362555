"""What the user asks for: one frozen recipe, from a name, a YAML or JSON file, and options.

"Off" is ``None`` in Python and ``none`` (for the certificate ``off``) in files and on the command line. A
recipe that exists is complete and free of contradictions; nothing later has to guess a default.
"""

from __future__ import annotations

import json
import reprlib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args, get_origin

import yaml
from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError, model_validator

from graphrot.errors import UsageError

RotationsFile = Annotated[str, StringConstraints(pattern=r"\.safetensors$")]
"""A file of learned rotations."""

Site = Literal["R1", "R2", "R3", "R4", "O"]
Bits = Literal["int8", "int4"]
Group = Literal["channel", 32, 64, 128]
Solver = Literal["rtn", "clip", "gptq"]

DEFAULT_RECIPE = "w4a8kv8"

DEFAULT_FOR_FILES = "w4a8"
"""For an .onnx file and a model in memory: programs that run it already hold its cache, which stays as it is."""

NAMED: dict[str, dict[str, Any]] = {
    "rotate-only": {},
    "w4a16": {"weights": "int4", "group": 32},
    "w4a8": {"weights": "int4", "group": "channel", "activations": "int8"},
    "w4a8kv8": {"weights": "int4", "group": "channel", "activations": "int8", "kv": "int8"},
    "w4a8kv4": {"weights": "int4", "group": "channel", "activations": "int8", "kv": "int4"},
    "w4a4kv4": {"weights": "int4", "group": 32, "activations": "int4", "kv": "int4"},
    "auto": {"rotations": "auto", "weights": "int4", "group": "channel", "activations": "int8", "bits": 4.6},
}
"""The named recipes: what each sets on top of the defaults."""

_WITH_WEIGHTS: dict[str, Any] = {
    "group": "channel",
    "symmetric": True,
    "solver": "gptq",
    "embedding": "int8",
    "head": "int8",
    "bits": None,
}
"""Defaults of the fields that only make sense with quantized weights; without, they are all none."""

_WITH_STOCK_CACHE: dict[str, Any] = {"kv_scales": "channel", "kv_range": "mse"}
"""Defaults of the fields that only make sense with a quantized cache in ONNX Runtime's own form."""

_SHORT = reprlib.Repr()
_SHORT.maxlevel = 2
"""Shows values of files in messages: YAML's aliases can make a few lines mean millions of words."""

_FORM = "write one field a line, such as 'weights: int4'"
"""What to do about a recipe file that is none."""

UNAVAILABLE: tuple[tuple[str, frozenset[Any], str, str], ...] = (
    ("certificate", frozenset({"layers"}), "the layer-by-layer certificate is not available in this version",
     "use full or off"),
)  # fmt: skip
"""Values the contract names and this version refuses: field, values, the reason, what to do."""


class Recipe(BaseModel):
    """One conversion, fully decided. Unknown keys are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=False)

    name: str = "custom"
    rotations: RotationsFile | Literal["hadamard", "random", "block-hadamard", "auto"] | None = "hadamard"
    """The matrices that are folded into weights; of a file of learned ones those that can be learned.
    ``auto``: Hadamard matrices for the kinds of sites that make the rounded model better, as measured."""
    only: tuple[Site, ...] | None = None
    """Which sites to rotate; None: what :attr:`sites` says."""
    online_r1: bool = False
    """Take R1 also where norms behind the branches keep it from being merged: transforms in every layer."""
    seed: int = Field(default=0, ge=0, lt=2**32)
    """Seed of the random signs (hadamard, block-hadamard) or matrices (random)."""
    weights: Bits | None = None
    group: Group | None = None
    """Weights that share a scale: an output channel, or a run of 32, 64 or 128 along the input."""
    symmetric: bool | None = None
    bits: float | None = Field(default=None, ge=4, le=9)
    """Stored bits per weight of the linears, scales included, at most: every weight gets a grid of its own, from
    ``weights``, ``group`` and ``symmetric`` up, as measured. None: these three for all."""
    embedding: Bits | None = None
    head: Bits | None = None
    activations: Bits | None = None
    kv: Bits | None = None
    kv_scales: Literal["tensor", "channel"] | None = None
    """Kernels ort: numbers of the cache that share a scale. Graphrot's cache has scales for every token and head."""
    kv_range: Literal["minmax", "mse"] | None = None
    """Kernels ort: where these scales come from: all that the calibration text shows, or the least squared error."""
    solver: Solver | None = None
    target: Literal["portable", "ort", "genai"] = "ort"
    provider: Literal["cpu", "cuda"] = "cpu"
    """Where the model is to run: of a file for ``cuda`` every node has a CUDA kernel."""
    dtype: Literal["float32", "float16", "bfloat16"] | None = None
    """Type of weights, activations and cache; None: float32 for a checkpoint, an ONNX model's own type for that; for
    ``cuda`` float16, unless an ONNX model is bfloat16."""
    kernels: Literal["graphrot", "ort"] = "graphrot"
    """Target ort, linears whose input is rounded, and attention over a quantized cache: graphrot's own operators, or
    those of ONNX Runtime."""
    certificate: Literal["full", "layers"] | None = "full"

    @property
    def quantizes(self) -> bool:
        """Whether any number of the model is rounded."""
        return any(v is not None for v in (self.weights, self.embedding, self.head, self.activations, self.kv))

    @property
    def stock_cache(self) -> bool:
        """The cache is quantized in the form of ONNX Runtime's own attention, with scales that are calibrated."""
        return self.kv is not None and self.target != "portable" and self.kernels == "ort"

    @property
    def calibrates(self) -> bool:
        """Whether numbers are taken from a text."""
        return self.solver == "gptq" or self.stock_cache or self.chooses

    @property
    def chooses(self) -> bool:
        """Whether measurements decide: which rotations, or the grids of weights."""
        return self.rotations == "auto" or self.bits is not None

    @property
    def reader(self) -> str:
        """What calibrates, in a word."""
        if self.solver == "gptq":
            return "gptq"
        return "--kv-scales" if self.stock_cache else "what chooses by measuring"

    @property
    def without_text(self) -> str:
        """Options with which nothing calibrates."""
        solver = ["--solver clip"] if self.solver == "gptq" else []
        measured = ["--rotations hadamard"] if self.rotations == "auto" else []
        measured += ["a recipe without bits"] if self.bits is not None else []
        return " and ".join([*solver, *(["--kernels graphrot"] if self.stock_cache else []), *measured])

    @property
    def sites(self) -> tuple[Site, ...]:
        """The kinds of sites to rotate.

        R3 helps only a quantized cache and costs a transform, so it is in where nothing is quantized
        (rotate-only), where the cache is, or where ``only`` names it. O, the transform across heads, is in where
        ``only`` names it.
        """
        if self.rotations is None:
            return ()
        if self.only is not None:
            return self.only
        if self.kv is not None or not self.quantizes:
            return ("R1", "R2", "R3", "R4")
        return ("R1", "R2", "R4")

    @property
    def rotations_file(self) -> str | None:
        """The file of learned rotations, if there is one."""
        return self.rotations if self.rotations is not None and self.rotations.endswith(".safetensors") else None

    @property
    def weight_bits(self) -> Literal[4, 8] | None:
        return None if self.weights is None else _bits(self.weights)

    @property
    def activation_bits(self) -> Literal[4, 8] | None:
        return None if self.activations is None else _bits(self.activations)

    @property
    def kv_bits(self) -> Literal[4, 8] | None:
        return None if self.kv is None else _bits(self.kv)

    @property
    def embedding_bits(self) -> Literal[4, 8] | None:
        return None if self.embedding is None else _bits(self.embedding)

    @property
    def head_bits(self) -> Literal[4, 8] | None:
        return None if self.head is None else _bits(self.head)

    @property
    def group_size(self) -> int | None:
        """Group length along the input, None per output channel (or no quantized weights)."""
        return self.group if isinstance(self.group, int) else None

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        for field, values, reason, do in UNAVAILABLE:
            value = getattr(self, field)
            for part in value if isinstance(value, tuple) else (value,):
                if part in values:
                    raise _refuse(f"{field} {part}: {reason}", field, do)
        if self.provider == "cuda" and self.dtype == "float32":
            raise _refuse(
                "dtype float32 is not written for provider cuda, whose attention and matmuls are half kernels",
                "dtype",
                "use float16 or bfloat16, or leave dtype out",
            )
        self._check_rotations()
        self._check_weights()
        self._check_cache()
        return self

    def _check_rotations(self) -> None:
        if self.rotations is None and self.only is not None:
            raise _refuse("'only' names rotations, but rotations are none", "only", "give one of the two")
        if self.only is not None and not self.only:
            raise _refuse("'only' names no site", "only", "name some of R1, R2, R3, R4, O, or use --rotations none")
        if self.only is not None and len(set(self.only)) != len(self.only):
            raise _refuse("'only' names a site twice", "only", "name each site once")
        if self.online_r1 and "R1" not in self.sites:
            raise _refuse("'online_r1' is about R1, which is not rotated", "online_r1", "leave it out, or rotate R1")
        if self.rotations == "auto" and self.weights is self.activations is self.kv is None:
            raise _refuse(
                "rotations auto measures what rounding costs, and this recipe rounds no weights, activations or cache",
                "rotations",
                "ask for one of these, or for rotations hadamard",
            )
        if self.rotations is None and not self.quantizes:
            raise _refuse(
                "Nothing to do: rotations are none and nothing is quantized", "rotations", "ask for one of the two"
            )

    def _check_weights(self) -> None:
        if self.weights is None:
            for field in ("group", "solver", "symmetric", "bits"):
                value = getattr(self, field)
                if value is not None:
                    raise _refuse(
                        f"{field} {str(value).lower()} says how weights are quantized, but weights are none",
                        field,
                        f"leave {field} out, or ask for weights int4 or int8",
                    )
            return
        for field in ("group", "solver", "symmetric"):
            if getattr(self, field) is None:
                raise _refuse(f"weights {self.weights} need a {field}", field, f"give {field}")
        if self.bits is not None and self.weights != "int4":
            raise _refuse(
                f"bits {self.bits:g} lets every weight have 4 or 8 bits, and weights {self.weights} leave no choice",
                "bits",
                "leave bits out, or ask for weights int4",
            )

    def _check_cache(self) -> None:
        for field in _WITH_STOCK_CACHE:
            value = getattr(self, field)
            if value is not None and not self.stock_cache:
                raise _refuse(
                    f"{field} {value} says how ONNX Runtime's own attention stores a quantized cache, which this "
                    "recipe does not ask for",
                    field,
                    f"leave {field} out, or ask for kv int4 or int8, kernels ort and another target than portable",
                )
            if value is None and self.stock_cache:
                raise _refuse(f"kv {self.kv} with kernels ort needs {field}", field, f"give {field}")


def _refuse(what: str, field: str, do: str) -> UsageError:
    return UsageError(what, where=f"recipe field {field!r}", do=do)


def _bits(word: Bits) -> Literal[4, 8]:
    return 4 if word == "int4" else 8


def resolve_recipe(spec: str | Path | Mapping[str, Any] | Recipe | None = None, **overrides: Any) -> Recipe:
    """Make the recipe of one conversion.

    Args:
        spec: a name (:data:`NAMED`), a YAML or JSON file, a mapping of fields, or a recipe; None: the default.
        overrides: fields that replace the recipe's. A field given here is checked as strictly as one in a
            file; fields that only made sense with a value that an override took away go with it (``weights=None``
            also drops the recipe's group, solver, symmetric, embedding and head).

    Returns:
        A complete recipe; its name gets a ``+`` where options changed it.

    Raises:
        UsageError: unknown name, key or value, a contradiction, or something this version does not have.
    """
    name, fields = _base(spec)
    given = {key: _plain(key, value) for key, value in overrides.items()}
    merged = {**fields, **given}
    if merged.get("weights") is not None:
        merged = {**_WITH_WEIGHTS, **merged}
    elif "weights" in given:
        merged = {key: value for key, value in merged.items() if key not in _WITH_WEIGHTS or key in given}
    if merged.get("kv") is not None and merged.get("kernels") == "ort" and merged.get("target") != "portable":
        merged = {**_WITH_STOCK_CACHE, **merged}
    elif given:
        merged = {key: value for key, value in merged.items() if key not in _WITH_STOCK_CACHE or key in given}
    if given.get("seed") is not None and merged.get("rotations", "") is None:
        raise _refuse("'seed' is for rotations, but rotations are none", "seed", "give one of the two")
    if "rotations" in given and given["rotations"] is None and "only" not in given:
        merged.pop("only", None)
    merged.setdefault("name", f"{name.rstrip('+')}+" if given else name)
    try:
        return Recipe.model_validate(merged)
    except ValidationError as error:
        raise _readable(error) from None


def default_recipe(source: object) -> str:
    """The name of the recipe for a source that comes without one.

    Args:
        source: as the user names it: text or a path, or a model in memory.
    """
    if isinstance(source, str | Path) and Path(source).suffix.lower() != ".onnx":
        return DEFAULT_RECIPE
    return DEFAULT_FOR_FILES


def _base(spec: str | Path | Mapping[str, Any] | Recipe | None) -> tuple[str, dict[str, Any]]:
    if spec is None:
        spec = DEFAULT_RECIPE
    if isinstance(spec, Recipe):
        unset = {name for name in _WITH_STOCK_CACHE if getattr(spec, name) is None}
        fields = spec.model_dump(exclude={"name", *unset})
        if spec.weights is None:
            fields = {key: value for key, value in fields.items() if key not in _WITH_WEIGHTS or value is not None}
        return spec.name, fields
    if isinstance(spec, Mapping):
        return "custom", {key: _plain(key, value) for key, value in spec.items()}
    if isinstance(spec, str) and spec in NAMED:
        return spec, dict(NAMED[spec])
    path = Path(spec)
    if path.suffix.lower() in (".yaml", ".yml", ".json"):
        return path.stem, _read(path)
    raise UsageError(
        f"There is no recipe {str(spec)!r}",
        where="--recipe",
        do=f"name one of {', '.join(_names())}, or give a .yaml or .json file",
    )


def _read(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = str(error)
        raise UsageError("The recipe file cannot be read", where=str(path), why=why, do="check the path") from None
    try:
        content = json.loads(text) if path.suffix.lower() == ".json" else yaml.safe_load(text)
    except (ValueError, yaml.YAMLError) as error:
        why = str(error)
        raise UsageError("The recipe file is not valid YAML or JSON", where=str(path), why=why, do=_FORM) from None
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise UsageError("A recipe file holds one mapping of field names to values", where=str(path), do=_FORM)
    base = content.pop("recipe", None)
    fields = {key: _plain(key, value) for key, value in content.items()}
    if base is None:
        return fields
    if not isinstance(base, str) or base not in NAMED:
        raise UsageError(
            f"The recipe file builds on an unknown recipe {_SHORT.repr(base)}",
            where=str(path),
            do=f"name one of {', '.join(_names())}",
        )
    return {**NAMED[base], **fields}


def _plain(key: str, value: Any) -> Any:
    """Words of files and of the command line -> Python: none and off, numbers of groups, lists of sites."""
    if key == "only" and value == "none":
        raise _refuse("'only' names no site", "only", "name some of R1, R2, R3, R4, O, or use --rotations none")
    if value == "none" or (key == "certificate" and value in ("off", False)):
        return None
    if key == "group" and isinstance(value, str) and value.isdigit():
        return int(value)
    if key == "only" and isinstance(value, str):
        return tuple(part.strip() for part in value.split(",") if part.strip())
    return value


def _names() -> list[str]:
    """The named recipes that this version takes."""
    absent = {(field, value) for field, values, _, _ in UNAVAILABLE for value in values}
    return [name for name, fields in NAMED.items() if absent.isdisjoint(fields.items())]


def _choices(field: str) -> list[str]:
    """The words that this version takes for a field, as files and the command line write them."""
    absent = {value for name, values, _, _ in UNAVAILABLE if name == field for value in values}
    found: list[str] = []

    def collect(kind: Any) -> None:
        if get_origin(kind) is Literal:
            found.extend(str(value) for value in get_args(kind) if value not in absent)
        elif kind == RotationsFile:
            found.append("FILE.safetensors")
        elif kind is type(None) and field != "dtype":
            found.extend([] if field == "only" else ["off" if field == "certificate" else "none"])
        else:
            for part in get_args(kind):
                collect(part)

    collect(Recipe.model_fields[field].annotation)
    return found


def _readable(error: ValidationError) -> UsageError:
    """Turn pydantic's report into one line per field."""
    by_field: dict[str, list[str]] = {}
    for item in error.errors():
        field = str(item["loc"][0]) if item["loc"] else "recipe"
        if item["type"] == "extra_forbidden":
            message = f"unknown key (known: {', '.join(Recipe.model_fields)})"
        elif item["type"] == "literal_error":
            message = f"should be one of {', '.join(_choices(field))} (got {_SHORT.repr(item['input'])})"
        else:
            message = f"{item['msg']} (got {_SHORT.repr(item['input'])})"
        by_field.setdefault(field, []).append(message)
    lines = [f"{field}: {messages[-1]}" for field, messages in by_field.items()]
    return UsageError("The recipe is not valid", where="; ".join(lines), do="see the table of recipes in the README")
