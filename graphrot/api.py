"""The public functions. Each is a thin front of the module that does the work."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from graphrot.progress import Progress, silent

if TYPE_CHECKING:
    import onnx
    import onnx_graphsurgeon as gs
    import onnxruntime

    from graphrot.bench.results import Comparison
    from graphrot.converted import Converted
    from graphrot.evaluate.generate import Generation
    from graphrot.evaluate.verify import Verification
    from graphrot.learn.result import Learned
    from graphrot.measure import Evaluation
    from graphrot.model.interop import ModelObject
    from graphrot.recipe import Recipe
    from graphrot.report.inspection import Inspection
    from graphrot.report.write import Report

for _name in ("graphrot.bench", "graphrot.convert", "graphrot.evaluate", "graphrot.learn", "graphrot.report"):
    # Modules that share their name with a public function: loaded first, so that the function keeps the name.
    import_module(_name)


def convert(
    source: str | Path | ModelObject,
    *,
    output: str | Path | None = None,
    recipe: str | Path | Mapping[str, Any] | Recipe | None = None,
    calibration: str | Path | None = None,
    tokenizer: str | Path | None = None,
    plan: str | Path | None = None,
    allow_partial: bool = False,
    force: bool = False,
    resume: bool = False,
    progress: Progress = silent,
    **overrides: Any,
) -> Converted:
    """Rotate and quantize a decoder; see :func:`graphrot.convert.convert`."""
    from graphrot.convert import convert as run

    return run(
        source,
        output=output,
        recipe=recipe,
        calibration=calibration,
        tokenizer=tokenizer,
        plan=plan,
        allow_partial=allow_partial,
        force=force,
        resume=resume,
        progress=progress,
        **overrides,
    )


def learn(
    source: str | Path | ModelObject,
    *,
    output: str | Path,
    recipe: str | Path | Mapping[str, Any] | Recipe | None = None,
    loss: str = "local",
    steps: int | None = None,
    rate: float | None = None,
    sequences: int | None = None,
    top_k: int | None = None,
    calibration: str | Path | None = None,
    tokenizer: str | Path | None = None,
    allow_partial: bool = False,
    force: bool = False,
    resume: bool = False,
    progress: Progress = silent,
    **overrides: Any,
) -> Learned:
    """Learn the rotations that are folded into a model's weights, for what a recipe rounds.

    The start are the recipe's matrices. What is written is for ``convert(..., rotations=output)``: the matrices with
    the least held-out loss. The same arguments give the same bits on one machine, interrupted or not.

    Args:
        source: as :func:`convert` takes it.
        output: ``X.safetensors``.
        recipe: as :func:`convert` takes it; it must round weights, activations or the cache, but for ``data-free``.
        loss: ``local`` (expected rounding errors of tensors), ``data-free`` (fourth moments of rotated weights),
            ``ce`` (next tokens' cross-entropy of the rounded model) or ``kl`` (its divergence from the float model).
        steps: at most; None: a number that serves the loss.
        rate: the largest length of a step, as a fraction of the matrix' norm; None: one that serves the loss.
        sequences: of 256 tokens of the calibration text, an eighth held out; None: a number that serves the loss.
        top_k: with ``kl``, compare the likeliest tokens only.
        calibration: what is learned on, as :func:`convert` takes it.
        tokenizer: a folder with tokenizer.json, for an .onnx source that has none beside it.
        allow_partial: go on where some of the asked rotations are refused.
        force: replace the file.
        resume: go on where an interrupted run with the same arguments stopped, if there is one.
        progress: told of each step.
        overrides: fields of the recipe.

    Raises:
        UsageError: options or recipe are wrong, or the output exists.
        InputRefused: the source or the text cannot be used, or nothing in it can be learned.
        CheckFailed: a loss is not finite, or a matrix is not orthogonal to 1e-6.
        EnvironmentProblem: torch is not installed, or the place cannot be written.
    """
    from graphrot.errors import EnvironmentProblem

    try:
        from graphrot.learn.learn import learn as run
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise EnvironmentProblem(
            "The package 'torch' is not installed",
            why="rotations are learned with it",
            do="pip install 'graphrot[learn]'",
        ) from error

    return run(
        source,
        output=output,
        recipe=recipe,
        loss=loss,
        steps=steps,
        rate=rate,
        sequences=sequences,
        top_k=top_k,
        calibration=calibration,
        tokenizer=tokenizer,
        allow_partial=allow_partial,
        force=force,
        resume=resume,
        progress=progress,
        **overrides,
    )


def inspect(model: str | Path | ModelObject, *, progress: Progress = silent) -> Inspection:
    """Find the rotation sites of a graph, without changing anything.

    Sites are those of the graph with its fused operators taken apart, as :func:`convert` does; rotary positions
    inside of attention it takes out only where R3 is asked for.

    Args:
        model: an .onnx file, a folder with ``model.onnx``, or a model in memory (see
            :func:`graphrot.convert.convert`).
        progress: told of each step.

    Raises:
        InputRefused: it is not a model that the analysis can run.
    """
    from graphrot.analysis.analyze import analyze
    from graphrot.model.apart import for_the_cpu, take_apart
    from graphrot.model.dequantize import dequantize
    from graphrot.model.interop import as_file
    from graphrot.model.load import load_onnx
    from graphrot.model.onnxfile import OWN_MARK
    from graphrot.model.widen import float_types, widen
    from graphrot.report.inspection import inspection

    with as_file(model) as path, TemporaryDirectory(prefix="graphrot-") as scratch:
        inside = path / "model.onnx"
        graph = load_onnx(inside if inside.is_file() else path)
        if OWN_MARK not in graph.metadata_props:
            dequantize(graph)
        if float_types(graph) is not None:
            graph, _ = widen(graph, Path(scratch))
        nodes = len(graph.graph)
        for_the_cpu(graph)
        take_apart(graph, rotary=True)
        return inspection(replace(analyze(graph, progress=progress), nodes=nodes))


def verify(
    a: str | Path | ModelObject,
    b: str | Path | ModelObject,
    *,
    text: str | Path | None = None,
    tokenizer: str | Path | None = None,
    provider: str = "cpu",
    progress: Progress = silent,
) -> Verification:
    """Compare two models' logits; see :func:`graphrot.evaluate.verify.verify`. Either may be a model in memory."""
    from graphrot.evaluate.device import provider_named
    from graphrot.evaluate.verify import verify as run
    from graphrot.model.interop import as_file

    with as_file(a) as first, as_file(b) as second:
        return run(
            first,
            second,
            text=_path(text),
            tokenizer=_path(tokenizer),
            provider=provider_named(provider),
            progress=progress,
        )


def evaluate(
    model: str | Path,
    *,
    text: str | Path | None = None,
    window: int = 1024,
    windows: int = 3,
    tokenizer: str | Path | None = None,
    reference: str | Path | None = None,
    tasks: str | Sequence[str] = (),
    limit: int | None = None,
    record: bool = False,
    allow_overlap: bool = False,
    provider: str = "cpu",
    progress: Progress = silent,
) -> Evaluation:
    """Perplexity of a model on the first ``windows`` windows of a text, agreement with another model, and tasks.

    Windows do not overlap, each starts from an empty cache, and the text is tokenized without special
    tokens. Figures of different windows are not comparable.

    Args:
        model: a folder that :func:`convert` wrote, or an .onnx file of a decoder.
        text: a UTF-8 file; None: only tasks.
        window: tokens per window.
        windows: number of windows.
        tokenizer: a folder with tokenizer.json; None: look beside the model.
        reference: another model with the same tokenizer, the float one for example: the divergence from it and the
            part of equal first choices are measured on the same windows.
        tasks: names of tasks of lm-eval, or YAML files of its form; in a list, or in one text with commas.
        limit: items of each task, from its start; None: all.
        record: put the figures into the model's graphrot.json.
        allow_overlap: go on where the model was calibrated or learned on parts of the text, with a note.
        provider: where model and reference run: ``cpu`` or ``cuda``.
        progress: told of each window, and of the tasks' requests.

    Raises:
        UsageError: a window of less than two tokens, nothing to measure, or an unknown task.
        InputRefused: model, text, tokenizer or a task cannot be used, the text is too short, or the model has seen it.
        CheckFailed: a model's answers are no numbers.
        EnvironmentProblem: lm-eval is missing, a task's data set cannot be had, or the CUDA provider cannot be used.
    """
    from graphrot.evaluate.device import provider_named
    from graphrot.measure import measure

    return measure(
        Path(model),
        text=_path(text),
        window=window,
        windows=windows,
        tokenizer=_path(tokenizer),
        reference=_path(reference),
        tasks=[task.strip() for task in tasks.split(",")] if isinstance(tasks, str) else tasks,
        limit=limit,
        record=record,
        allow_overlap=allow_overlap,
        provider=provider_named(provider),
        progress=progress,
    )


def generate(
    model: str | Path,
    *,
    prompt: str,
    max_new_tokens: int = 64,
    greedy: bool = False,
    chat: bool = False,
    library: bool = True,
    tokenizer: str | Path | None = None,
    provider: str = "cpu",
    on_text: Callable[[str], None] | None = None,
) -> Generation:
    """Continue a prompt.

    Args:
        model: a folder that :func:`convert` wrote, or an .onnx file of a decoder.
        prompt: the text to continue, or with ``chat`` the user's message.
        max_new_tokens: stop after so many tokens.
        greedy: take the likeliest token each time instead of sampling.
        chat: put the prompt into the model's chat template.
        library: use the native library if it is installed; False: the functions in the file run.
        tokenizer: a folder with tokenizer.json; None: look beside the model.
        provider: where it runs: ``cpu`` or ``cuda``.
        on_text: called with each piece of text as it comes.

    Raises:
        InputRefused: model or tokenizer cannot be used.
        CheckFailed: the model's answers are no numbers.
        EnvironmentProblem: ONNX Runtime's CUDA provider cannot be used.
    """
    from graphrot.evaluate.device import provider_named
    from graphrot.evaluate.generate import Sampling
    from graphrot.evaluate.generate import generate as run
    from graphrot.evaluate.session import open_decoder
    from graphrot.evaluate.text import find_tokenizer, foreign_notes

    path = Path(model)
    decoder = open_decoder(path, library=None if library else False, provider=provider_named(provider))
    words = find_tokenizer(_path(tokenizer), beside=(path,))
    sampling = None if greedy else Sampling()
    answer = run(decoder, words, prompt, max_new_tokens=max_new_tokens, sampling=sampling, chat=chat, on_text=on_text)
    return replace(answer, notes=foreign_notes(words, decoder.vocabulary))


def bench(
    *models: str | Path,
    prefill: int = 256,
    decode: int = 64,
    context: Sequence[int] = (128, 1024),
    batch: int = 1,
    threads: int = 1,
    turns: int = 9,
    chart: str | Path | None = None,
    provider: str = "cpu",
    progress: Progress = silent,
) -> Comparison:
    """Measure decoders side by side: tokens per second of prefill and decoding, and memory.

    All models run in every turn, in an order that rotates. Figures are medians with the 10th and 90th percentile;
    ratios are to the first model, taken turn by turn. On one thread of the CPU the time is that thread's CPU time, else
    wall time.

    Args:
        models: folders that :func:`convert` or onnxruntime-genai's builder wrote, or .onnx files with a KV cache.
        prefill: tokens of one run from an empty cache.
        decode: single tokens, one after the other, at each context.
        context: lengths of the cache that decoding starts with; one that a model does not take is left out, with a
            note.
        batch: equal rows that run at once.
        threads: of ONNX Runtime.
        turns: how often all is measured.
        chart: a PNG to draw speed, cache and memory by context into.
        provider: where the models run: ``cpu`` or ``cuda``; memory is that of the host.
        progress: told of each turn.

    Raises:
        UsageError: no model, a number that is not positive, or a chart that cannot be written.
        InputRefused: a model is no decoder, has no cache, or does not take this batch, the prefill or any context.
        EnvironmentProblem: there is no matplotlib for the chart, no memory for a cache, or the CUDA provider cannot be
            used.
    """
    from graphrot.bench.chart import check, draw
    from graphrot.bench.compare import bench as run
    from graphrot.bench.results import Settings
    from graphrot.evaluate.device import provider_named

    settings = Settings(prefill, decode, tuple(context), batch, threads, turns, provider_named(provider))
    if chart is not None:
        check(Path(chart))
    result = run([Path(model) for model in models], settings, progress=progress)
    if chart is not None:
        draw(result, Path(chart))
    return result


def report(
    model: str | Path,
    *,
    output: str | Path | None = None,
    text: str | Path | None = None,
    source: str | None = None,
    tokenizer: str | Path | None = None,
    progress: Progress = silent,
) -> Report:
    """Write one HTML page about a conversion; see :func:`graphrot.report.write.write_report`."""
    from graphrot.report.write import write_report

    return write_report(model, output=output, text=text, source=source, tokenizer=tokenizer, progress=progress)


def export_graphsurgeon(graph: gs.Graph) -> onnx.ModelProto:
    """``gs.export_onnx`` without its losses; see :func:`graphrot.model.interop.export_graphsurgeon`.

    Raises:
        InputRefused: the graph is no valid model.
    """
    from graphrot.model.interop import export_graphsurgeon as run

    return run(graph)


def register(session_options: onnxruntime.SessionOptions) -> None:
    """Give ONNX Runtime sessions that are made with these options graphrot's kernels.

    Without it, models run all the same, by the functions that they carry.

    Raises:
        EnvironmentProblem: the native library is not installed, or the runtime refuses it.
    """
    from graphrot.ops.library import register as run

    run(session_options)


def library_path() -> Path:
    """Path of the native library, for runtimes that load it themselves.

    Raises:
        EnvironmentProblem: it is not installed.
    """
    from graphrot.ops.library import library_path as run

    return run()


def _path(value: str | Path | None) -> Path | None:
    return None if value is None else Path(value)
