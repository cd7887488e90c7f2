"""Text from the model, for sample audits and for people.

What may live here: drawing tokens, and the command that does it from a checkpoint. Nothing here
changes a state: it draws from own generators on the CPU and puts the model's mode back.

Invariant: equal weights, prompts and seeds give equal texts, during training or after it.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch

from supervisor import config, contract
from trainer import checkpoint, data, device, model, recipe
from trainer.checkpoint import NonFiniteState, StateMismatch
from trainer.model import Decoder
from trainer.tokenizer import Tokenizer


def never() -> bool:
    """The answer of somebody who has all the time that it takes."""
    return False


def continue_texts(
    decoder: Decoder,
    words: Tokenizer,
    prompts: Sequence[str],
    *,
    tokens: int,
    temperature: float,
    seeds: Sequence[int],
    precision: str = "float32",
    give_up: Callable[[], bool] = never,
) -> list[str] | None:
    """What follows each prompt, without the prompt: at most `tokens` tokens, up to the separator.

    All prompts advance together, each by its own generator of its own seed. `temperature` 0 takes
    the likeliest token. None where `give_up`, asked before each token, said so. Raises
    NonFiniteState where the model has no token to draw.
    """
    rows = [[words.special, *words.encode(prompt.encode())] for prompt in prompts]
    begun = [len(row) for row in rows]
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    going = list(range(len(rows)))
    with looking_only(decoder):
        for _ in range(tokens):
            if give_up():
                return None
            scores = _next_scores(decoder, [rows[row] for row in going], precision)
            for row, score in zip(going, scores, strict=True):
                rows[row].append(_choose(score, temperature, generators[row]))
            going = [row for row in going if rows[row][-1] != words.special]
            if not going:
                break
    return [words.decode(row[start:]) for row, start in zip(rows, begun, strict=True)]


@contextlib.contextmanager
def looking_only(decoder: Decoder) -> Iterator[None]:
    """No dropout and no graph inside; the mode that was before after it."""
    before = decoder.training
    decoder.eval()
    try:
        with torch.inference_mode():
            yield
    finally:
        decoder.train(before)


def _next_scores(decoder: Decoder, rows: Sequence[Sequence[int]], precision: str) -> torch.Tensor:
    """Scores of the token after each row, on the CPU: (rows, vocabulary)."""
    windows = [row[-decoder.shape.context :] for row in rows]
    longest = max(map(len, windows))
    padded = torch.tensor([[*window, *[0] * (longest - len(window))] for window in windows])
    last = torch.tensor([len(window) - 1 for window in windows])
    place = decoder.flat.device
    with device.autocast(place, precision):
        return decoder.logits(padded.to(place), last.to(place)).cpu()


def _choose(score: torch.Tensor, temperature: float, generator: torch.Generator) -> int:
    if temperature == 0:
        return int(score.argmax().item())
    chances = torch.softmax(score / temperature, dim=-1)
    if not chances.isfinite().all():
        raise NonFiniteState(
            "the model's scores of the next token are not finite, so that none can be drawn; its"
            " weights have diverged. Go back to a checkpoint before it"
        )
    return int(torch.multinomial(chances, 1, generator=generator).item())


# --- the command ----------------------------------------------------------------------------------


def generate(
    run_directory: Path,
    prompt: str,
    *,
    tokens: int,
    temperature: float,
    seed: int,
    step: int | None = None,
    where: str | None = None,
) -> str:
    """The prompt and what follows it, from the newest valid checkpoint or that of `step`.

    On the device `where`; None is that of the training, and the CPU where it is not there, which
    is said. Only reads, so the run may train meanwhile. Raises LookupError where no checkpoint is
    valid, CheckpointDamaged, DeviceError, NonFiniteState, or StateMismatch where the tokenizer is
    another one now.
    """
    directory = run_directory / contract.CHECKPOINTS
    manifest = _manifest(directory, step)
    settings = config.parse(manifest.state["configuration"], f"checkpoint {manifest.step}")
    place = device.resolve(where) if where is not None else _place_of(manifest, settings)
    recipe.set_switches(settings, place)
    words = data.load_tokenizer(settings)
    recorded = manifest.state["tokenizer"]["digest"]
    if words.digest != recorded:
        raise StateMismatch(
            f"tokenizer digest: saved {recorded}, now {words.digest}; the checkpoint was trained"
            f" with other tokens than those of {settings.tokenizer.file}"
        )
    decoder = model.build(recipe.shape_of(settings, words.vocabulary), place, seed=None)
    checkpoint.load(directory, manifest, decoder.flat)
    texts = continue_texts(
        decoder,
        words,
        [prompt],
        tokens=tokens,
        temperature=temperature,
        seeds=[seed],
        precision=settings.trainer.precision,
    )
    assert texts is not None, "nobody asked to give up"
    return prompt + texts[0]


def _place_of(manifest: contract.Manifest, settings: config.Settings) -> torch.device:
    trained_on = str(manifest.state["environment"].get("device", settings.trainer.device))
    try:
        return device.resolve(trained_on)
    except device.DeviceError:
        print(f"trained on {trained_on}, which is not here: this is from the CPU", file=sys.stderr)
        return torch.device("cpu")


def neutralised(text: str) -> str:
    """Text that cannot steer a terminal: no control characters but newline and tab."""
    return "".join(c if c in "\n\t" or c.isprintable() else "\ufffd" for c in text)


def _manifest(directory: Path, step: int | None) -> contract.Manifest:
    if step is not None:
        return checkpoint.verify(directory, step)
    selection = checkpoint.select(directory, None)
    for number, reason in selection.rejected:
        print(f"checkpoint {number} was passed over: {reason}", file=sys.stderr)
    if selection.chosen is None:
        raise LookupError(f"{directory} holds no valid checkpoint")
    return selection.chosen
