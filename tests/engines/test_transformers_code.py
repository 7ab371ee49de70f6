"""Code that is not the known packages' own: classes, forwards put onto classes, tokens in front."""

from __future__ import annotations

import functools
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GitConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaMLP

from kvsnap.engines import Transformers
from kvsnap.engines.transformers_code import own_code
from kvsnap.engines.transformers_identity import check_model
from kvsnap.formats.errors import Unsupported
from kvsnap.testing.tiny_llama import CACHE, tiny_llama

pytestmark = pytest.mark.engine


def identity(model: Any) -> str:
    return Transformers(model).identity(64, lambda path: "").canonical()


OWN = """
from transformers import LlamaForCausalLM

class Own(LlamaForCausalLM):
    def forward(self, *given, **more):
        return super().forward(*given, **more, scale={})
"""


def test_classes_of_ones_own_are_another_model_and_edited_ones_one_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    codes = []
    for number, scale in enumerate((1, 1, 2)):
        path = tmp_path / str(number) / "script.py"
        path.parent.mkdir()
        path.write_text(OWN.format(scale))
        spec = spec_from_file_location("script", path)
        assert spec is not None
        assert spec.loader is not None
        script = module_from_spec(spec)
        monkeypatch.setitem(sys.modules, "script", script)
        spec.loader.exec_module(script)
        codes.append(own_code(tiny_llama(script.Own)))
    assert "script.Own" in codes[0][0][1]
    assert codes[0] == codes[1] != codes[2]
    assert own_code(tiny_llama()) == ()


def test_classes_without_a_source_are_told_apart_as_well() -> None:
    def made(forward: Any) -> Any:
        return own_code(tiny_llama(type("Made", (LlamaForCausalLM,), {"forward": forward})))

    once, twice = (lambda self, ids: [ids * n for n in (1, 2)]), (lambda self, ids: ids * 3)
    assert made(once) == made(once) != made(twice)
    assert made(lambda self, ids: ids * 2) != made(twice)


@pytest.mark.parametrize("wrapped", ["not", "as if it were the class's own", "by torch"])
def test_a_forward_that_was_put_onto_a_class_is_another_model(
    wrapped: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_llama()
    plain, forward = identity(model), LlamaMLP.forward

    def doubled(self: Any, hidden: torch.Tensor) -> Any:
        return forward(self, hidden) * 2

    wrap = {
        "not": lambda function: function,
        "as if it were the class's own": functools.wraps(forward),
        "by torch": torch.no_grad(),
    }[wrapped]
    monkeypatch.setattr(LlamaMLP, "forward", wrap(doubled))
    assert identity(model) != plain


class Virtual(LlamaForCausalLM):
    """Puts a token in front, as prompt tuning does."""

    def forward(self, input_ids: Any, cache: Any = None, use_cache: bool = True, **_: Any) -> Any:
        embedded = self.get_input_embeddings()(input_ids)
        front = embedded[:, : int(cache.get_seq_length() == 0)]
        return super().forward(
            inputs_embeds=torch.cat([front, embedded], 1), use_cache=use_cache, **{CACHE: cache}
        )


def test_tokens_that_a_model_puts_in_front_are_refused() -> None:
    with pytest.raises(Unsupported, match="tokens of its own in front"):
        Transformers(tiny_llama(Virtual))


def test_a_model_that_takes_pixels_which_no_token_stands_for_is_refused() -> None:
    model = tiny_llama()
    model.config = GitConfig()
    with pytest.raises(Unsupported, match=r"more than text \(vision_config\)"):
        check_model(model)


@pytest.mark.parametrize("what", ["hook", "pre-hook", "forward"])
def test_what_a_program_put_onto_a_module_is_refused_until_it_is_gone(what: str) -> None:
    """Activation steering: the same weights, other rows."""
    model = tiny_llama()
    layer = model.model.layers[0]
    if what == "forward":
        own = layer.forward
        layer.forward = lambda *given, **more: own(*given, **more)
    elif what == "hook":
        handle = layer.register_forward_hook(lambda module, given, out: None)
    else:
        handle = layer.register_forward_pre_hook(lambda module, given: None)
    with pytest.raises(Unsupported, match="of its own"):
        Transformers(model)
    if what == "forward":
        del layer.forward
    else:
        handle.remove()
    Transformers(model)
