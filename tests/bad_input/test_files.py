"""What is no ONNX model, or not all of one."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path

import onnx
import pytest

from graphrot.cli.main import run
from graphrot.model.onnxfile import open_onnx
from tests.bad_input.conftest import QUICK, Refuse

COMMANDS = ("convert", "inspect", "verify", "eval", "generate")


def line(command: str, model: Path) -> list[str | Path]:
    """A command line that reads ``model``."""
    further: dict[str, list[str | Path]] = {
        "verify": [model],
        "eval": ["--text", Path(__file__)],
        "generate": ["--prompt", "x"],
    }
    return [command, model, *further.get(command, [])]


@pytest.mark.parametrize("command", COMMANDS)
def test_missing(command: str, tmp_path: Path, refuse: Refuse) -> None:
    refuse(3, line(command, tmp_path / "absent.onnx"), "There is no such", "absent.onnx")


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", ("it is empty", "holds no graph with operators")),
        (
            b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n",
            ("Git LFS pointer", "git lfs pull"),
        ),
        (b"<!DOCTYPE html>\n<html><body>404: Not Found", ("it is a web page", "download the file itself")),
        (b"PK\x03\x04\x14\x00rest of an archive", ("zip archive or a file of torch",)),
        (b"GGUF\x03\x00\x00\x00", ("it is a GGUF file", ".gguf")),
        (struct.pack("<Q", 12) + b'{"a":{}}    ', ("it is a safetensors file", "give the folder")),
        (b"\x1f\x8b\x08\x00rest", ("compressed by gzip", "unpack it")),
        (b"\x18\x00\x00\x00ORTM rest", ("ONNX Runtime's own format",)),
        (bytes(4096), ("begins with zeros", "download it again")),
        (b"this is no protobuf at all", ("it does not parse",)),
    ],
    ids="empty lfs html zip gguf safetensors gzip ort zeros garbage".split(),
)
def test_something_else(command: str, content: bytes, words: tuple[str, ...], tmp_path: Path, refuse: Refuse) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(content)
    refuse(3, line(command, path), "The file is not a usable ONNX model", str(path), *words)


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("part", [0.5, 0.9, 0.999])
def test_truncated(command: str, part: float, model: Path, refuse: Refuse) -> None:
    content = model.read_bytes()
    model.write_bytes(content[: int(part * len(content))])
    refuse(3, line(command, model), str(model))


@pytest.mark.parametrize("command", COMMANDS)
def test_corrupt(command: str, model: Path, refuse: Refuse) -> None:
    content = bytearray(model.read_bytes())
    content[100:140] = b"\xff" * 40
    model.write_bytes(content)
    refuse(3, line(command, model), "The file is not a usable ONNX model", "check the download")


def test_over_two_gigabytes(tmp_path: Path, refuse: Refuse) -> None:
    path = tmp_path / "model.onnx"
    with path.open("wb") as file:
        file.truncate(2**31)
    refuse(3, ["convert", path], "cannot have more than 2147483647", "save_as_external_data=True")


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin", "model.pt", "model.pth"])
def test_weights_given_instead_of_their_folder(name: str, tmp_path: Path, refuse: Refuse) -> None:
    (tmp_path / name).write_bytes(b"weights")
    refuse(3, ["convert", tmp_path / name], "The source is not understood", "give the folder")


def test_an_empty_folder(tmp_path: Path, refuse: Refuse) -> None:
    (tmp_path / "empty").mkdir()
    refuse(3, ["convert", tmp_path / "empty"], "holds no config.json", "give a folder with config.json and weights")
    refuse(3, ["inspect", tmp_path / "empty"], "The model is a folder", "give the .onnx file")
    refuse(3, ["eval", tmp_path / "empty", "--text", __file__], "There is no such model")


def test_a_folder_of_onnx_files(place: Path, refuse: Refuse) -> None:
    refuse(3, ["convert", place], "not a Hugging Face model", "give one of the .onnx files", "split.onnx")
    (place / "split.onnx").unlink()
    refuse(3, ["convert", place], "not a Hugging Face model", "give the .onnx file itself")


@pytest.mark.parametrize("command", COMMANDS)
def test_missing_external_data(command: str, split: Path, refuse: Refuse) -> None:
    split.with_name("split.onnx.data").unlink()
    refuse(3, line(command, split), "external data is missing", "split.onnx.data", "put the file beside the model")


@pytest.mark.parametrize("command", COMMANDS)
def test_short_external_data(command: str, split: Path, refuse: Refuse) -> None:
    data = split.with_name("split.onnx.data")
    data.write_bytes(data.read_bytes()[:-100])
    refuse(3, line(command, split), "external data is too short", "reads up to byte", "copy or download")


def test_renamed_without_its_data(split: Path, refuse: Refuse) -> None:
    renamed = split.rename(split.with_name("renamed.onnx"))
    data = split.with_name("split.onnx.data")
    other = data.rename(split.with_name("renamed.onnx.data"))
    refuse(3, ["convert", renamed], "external data is missing", "renamed.onnx.data looks like it", "split.onnx.data")
    other.unlink()
    refuse(3, ["convert", renamed], "a model that was renamed still asks for the old name")


def _relocated(split: Path, location: str) -> Path:
    proto = onnx.load(split, load_external_data=False)
    for tensor in proto.graph.initializer:
        for entry in tensor.external_data:
            if entry.key == "location":
                entry.value = location
    split.write_bytes(proto.SerializeToString())
    return split


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("location", ["{above}/split.onnx.data", "../split.onnx.data", "down/../../split.onnx.data"])
def test_data_outside_the_folder(command: str, location: str, split: Path, tmp_path: Path, refuse: Refuse) -> None:
    split.with_name("split.onnx.data").rename(tmp_path / "split.onnx.data")
    (split.parent / "down").mkdir()
    model = _relocated(split, location.format(above=tmp_path))
    refuse(3, line(command, model), "lies outside its folder", "must not point at arbitrary files")


@pytest.mark.parametrize("command", COMMANDS)
def test_a_link_out_of_the_folder(command: str, split: Path, tmp_path: Path, refuse: Refuse) -> None:
    data = split.with_name("split.onnx.data")
    data.symlink_to(data.rename(tmp_path / "secret"))
    refuse(3, line(command, split), "lies outside its folder", "not a link")


@pytest.mark.parametrize("location", ["", "a\0b", "x" * 300, "."])
def test_names_that_no_file_has(location: str, split: Path, refuse: Refuse) -> None:
    refuse(3, ["convert", _relocated(split, location)], "input refused")


@pytest.mark.parametrize(("key", "text"), [("offset", "-1"), ("offset", "1e3"), ("length", "-4"), ("length", "7")])
def test_odd_places_in_the_data(key: str, text: str, split: Path, refuse: Refuse) -> None:
    proto = onnx.load(split, load_external_data=False)
    tensor = next(t for t in proto.graph.initializer if t.external_data)
    for entry in tensor.external_data:
        if entry.key == key:
            entry.value = text
    split.write_bytes(proto.SerializeToString())
    refuse(3, ["convert", split], "A tensor of the model is not usable", repr(tensor.name))


@pytest.fixture
def cached(split: Path) -> Path:
    """The model as Hugging Face's cache keeps it: links into a folder of blobs."""
    snapshot = split.parent / "hub" / "snapshots" / "abc" / "onnx"
    blobs = split.parent / "hub" / "blobs"
    for folder in (snapshot, blobs):
        folder.mkdir(parents=True)
    for number, name in enumerate(("split.onnx", "split.onnx.data")):
        (split.parent / name).rename(blobs / f"blob{number}")
        (snapshot / name).symlink_to(Path("../../../blobs") / f"blob{number}")
    return snapshot / "split.onnx"


def test_links_of_a_hub_cache_are_followed(cached: Path, whole: Path, tmp_path: Path) -> None:
    """They lead to the folder in which the model itself really lies; nothing else is reached by them."""
    output = tmp_path / "out.onnx"
    assert run(["convert", str(cached), "-o", str(output), "--recipe", "rotate-only"]) == 0
    assert run(["verify", str(whole / "split.onnx"), str(output)]) == 0
    assert run(["verify", str(cached), str(output)]) == 0
    assert run(["inspect", str(cached)]) == 0
    expected = {v.name: v.const_value for v in open_onnx(whole / "split.onnx").graph.initializers.values()}
    for value in open_onnx(cached).graph.initializers.values():
        assert value.const_value is not None and expected[value.name] is not None
        assert value.const_value.tobytes() == expected[value.name].tobytes()


def test_a_hub_cache_whose_data_leads_elsewhere(cached: Path, tmp_path: Path, refuse: Refuse) -> None:
    data = cached.with_name("split.onnx.data")
    real = data.resolve().rename(tmp_path / "elsewhere")
    data.unlink()
    data.symlink_to(real)
    refuse(3, ["convert", cached], "lies outside its folder")


def test_a_model_that_was_converted(model: Path, tmp_path: Path, refuse: Refuse) -> None:
    for output in (tmp_path / "made", tmp_path / "made.onnx"):
        assert run(["convert", str(model), "-o", str(output), *QUICK]) == 0
    for source in (tmp_path / "made", tmp_path / "made.onnx", tmp_path / "made" / "model.onnx"):
        refuse(3, ["convert", source], "already converted by graphrot", "convert the source that it was made from")


def test_garbage_in_graphrot_json(model: Path, tmp_path: Path, refuse: Refuse) -> None:
    """A folder that claims to be an output is no source, and its runs do not read the manifest."""
    assert run(["convert", str(model), "-o", str(tmp_path / "made"), *QUICK]) == 0
    (tmp_path / "made" / "graphrot.json").write_bytes(b"\xff{garbage")
    refuse(3, ["convert", tmp_path / "made"], "already converted by graphrot")
    assert run(["verify", str(model), str(tmp_path / "made")]) == 0


Change = Callable[[Callable[[onnx.ModelProto], object]], Path]


def test_text_that_is_not_utf8(model: Path, refuse: Refuse) -> None:
    content = model.read_bytes()
    assert content.count(b"present.0.key") == 3
    model.write_bytes(content.replace(b"present.0.key", b"present.0.k\xe9y"))
    refuse(3, ["convert", model], "not UTF-8")
