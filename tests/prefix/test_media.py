"""Prompts with images or sound: the same ones are found, others never, and what is found is what would be computed."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from architectures import DECODER, LAYER_PATTERN, VOCABULARY, WINDOW, settle, tiny_model
from strategies import CACHE_ARGUMENT
from torch import Tensor
from transformers import PreTrainedModel

from hf_kvcache import InputError, PrefixSharedCache, PrefixStore, StateError
from hf_kvcache.prefix.media import Media, read_media

SIZE = 4
PLACEHOLDER = VOCABULARY - 1
ANSWER = {"max_new_tokens": 5, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}

TEXT = {**DECODER, "num_hidden_layers": 2}
MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
VIT = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "patch_size": 4}
QWEN_VIT = {"depth": 1, "num_heads": 2, "patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2}
QWEN2_5_VIT = {**QWEN_VIT, "hidden_size": 16, "intermediate_size": 16, "out_hidden_size": 32, "window_size": 16}


class Kind(NamedTuple):
    """A kind of model, and what a processor would make for it."""

    name: str
    options: dict[str, Any]
    inputs: Callable[[int], tuple[dict[str, Tensor], int]]
    """For an image of this seed, and how many placeholders it takes."""
    types: str | None = None


def noise(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def picture(seed: int) -> tuple[dict[str, Tensor], int]:
    return {"pixel_values": noise(1, 3, 8, 8, seed=seed)}, 4


def picture_in_parts(seed: int) -> tuple[dict[str, Tensor], int]:
    # The whole, then one part with the end of a line behind each of its two lines.
    return {"pixel_values": noise(1, 2, 3, 8, 8, seed=seed), "image_sizes": torch.tensor([[8, 8]])}, 4 + 6


def grid(seed: int) -> tuple[dict[str, Tensor], int]:
    """Images of odd seeds are wider: their positions are farther from counting tokens."""
    patches = torch.tensor([[1, 4, 8 if seed % 2 else 4]])
    total = int(patches.prod())
    return {"pixel_values": noise(total, 3 * 2 * 4 * 4, seed=seed), "image_grid_thw": patches}, total // 4


def film(seed: int) -> tuple[dict[str, Tensor], int]:
    return {"pixel_values_videos": noise(32, 96, seed=seed), "video_grid_thw": torch.tensor([[2, 4, 4]])}, 8


def sound(seed: int) -> tuple[dict[str, Tensor], int]:
    return {"input_features": noise(1, 8, 16, seed=seed)}, 4


KINDS = [
    Kind("Llava", {"text_config": {**TEXT, "model_type": "llama"}, "vision_config": {**VIT, "image_size": 8}}, picture),
    Kind(
        "LlavaNext",
        {
            "text_config": {**TEXT, "model_type": "llama"},
            "vision_config": {**VIT, "image_size": 8},
            "image_grid_pinpoints": [[8, 8]],
        },
        picture_in_parts,
    ),
    Kind(
        "Gemma3",
        {
            "text_config": {**TEXT, **LAYER_PATTERN, "num_hidden_layers": 4, "head_dim": 8, "sliding_window": WINDOW},
            "vision_config": {**VIT, "image_size": 8},
            "mm_tokens_per_image": 4,
        },
        picture,
        "token_type_ids",
    ),
    *(
        Kind(
            name,
            {"text_config": {**TEXT, "head_dim": 8, "rope_parameters": MROPE}, "vision_config": vision},
            grid,
            "mm_token_type_ids",
        )
        for name, vision in (
            ("Qwen2VL", {**QWEN_VIT, "embed_dim": 16, "hidden_size": 32}),
            ("Qwen2_5_VL", {**QWEN2_5_VIT, "fullatt_block_indexes": [0]}),
            ("Qwen3VL", {**QWEN2_5_VIT, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]}),
        )
    ),
    Kind(
        "Voxtral",
        {
            "text_config": {**TEXT, "model_type": "llama"},
            "audio_config": {
                "hidden_size": 16,
                "intermediate_size": 32,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "num_mel_bins": 8,
                "max_source_positions": 8,
            },
        },
        sound,
    ),
]
BY_NAME = {kind.name: kind for kind in KINDS}


@functools.cache
def model_of(name: str) -> PreTrainedModel:
    kind = BY_NAME[name]
    config = getattr(transformers, f"{name}Config")(**kind.options)
    for attribute in ("image_token_id", "video_token_id", "audio_token_id"):
        if hasattr(config, attribute):
            setattr(config, attribute, PLACEHOLDER - (attribute == "video_token_id"))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model_class = getattr(transformers, f"{name}ForConditionalGeneration")
        model = model_class._from_config(config, dtype=torch.float64).eval()
    settle(model)
    return model


def ask(name: str, image: int | None = 0, question: int = 0, before: int = 5, after: int = 8) -> dict[str, Tensor]:
    """A prompt: some words, an image, a question."""
    kind = BY_NAME[name]
    inputs, placeholders = ({}, 0) if image is None else kind.inputs(image)
    words = torch.randint(3, PLACEHOLDER - 1, (1, before), generator=torch.Generator().manual_seed(99))
    asked = torch.randint(3, PLACEHOLDER - 1, (1, after), generator=torch.Generator().manual_seed(question))
    ids = torch.cat([words, torch.full((1, placeholders), PLACEHOLDER), asked], dim=1)
    types = {} if kind.types is None else {kind.types: (ids == PLACEHOLDER).long()}
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), **inputs, **types}


def check_same(name: str, store: PrefixStore, inputs: dict[str, Tensor], hit: bool, **options: Any) -> Tensor:
    """What the store generates is what the model does; returns it."""
    model, before = model_of(name), store.stats()
    # The store first: what the model alone would be asked now, it could remember.
    output = store.generate(model, **inputs, **ANSWER, **options)
    expected = model.generate(**inputs, **ANSWER, **options)
    torch.testing.assert_close(output.sequences, expected.sequences, rtol=0, atol=0)
    for ours, theirs in zip(output.logits, expected.logits, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5 * theirs.abs().max().item())
    assert store.stats().hits - before.hits == hit
    store.check_integrity()
    return output.sequences


@pytest.mark.parametrize("name", BY_NAME)
def test_what_is_found_is_what_would_be_computed(name: str) -> None:
    store = PrefixStore.for_model(model_of(name), block_size=SIZE)
    first = ask(name)
    answer = check_same(name, store, first, hit=False)
    check_same(name, store, first, hit=True)
    check_same(name, store, ask(name, question=1), hit=True)
    check_same(name, store, ask(name, question=2), hit=True, num_beams=2)
    # Another image, as large as the first or not, then the first again: a model may remember what was last.
    for image in (2, 1):
        check_same(name, store, ask(name, image=image), hit=False)
    other = store.stats()
    assert other.misses == {"nothing_shared": 1, "other_media": 2}
    check_same(name, store, first, hit=True)
    # The next turn finds the answer too.
    words = torch.cat([answer, ask(name, question=3)["input_ids"][:, -3:]], dim=1)
    turn = {**first, "input_ids": words, "attention_mask": torch.ones_like(words)}
    if types := BY_NAME[name].types:
        turn[types] = (words == PLACEHOLDER).long()
    before = store.stats().hit_tokens
    check_same(name, store, turn, hit=True)
    head = int((words[0] == PLACEHOLDER).nonzero()[-1]) + 1
    assert store.stats().hit_tokens - before == head + (answer.shape[1] - 1 - head) // SIZE * SIZE


@pytest.mark.parametrize("name", ["Gemma3", "Qwen2VL"])
def test_text_alone_is_not_disturbed_by_images(name: str) -> None:
    """A model that remembers the positions of its last image reads a text, and a batch of texts, all the same."""
    store = PrefixStore.for_model(model_of(name), block_size=SIZE)
    text = ask(name, image=None, after=20)
    plain = {key: text[key] for key in ("input_ids", "attention_mask")}
    check_same(name, store, text, hit=False)
    check_same(name, store, ask(name), hit=False)
    assert store.stats().misses == {"nothing_shared": 1, "other_media": 1}
    batch = {key: torch.cat([text[key], ask(name, None, 1, after=20)[key]]) for key in text}
    batch["input_ids"][:, :12] = text["input_ids"][:1, :12]
    for inputs in (text, plain):
        expected = model_of(name).generate(**inputs, max_new_tokens=4, do_sample=False)
        model_of(name).generate(**ask(name, image=1), max_new_tokens=1)
        assert torch.equal(store.generate(model_of(name), **inputs, max_new_tokens=4, do_sample=False), expected)
    expected = model_of(name).generate(**batch, max_new_tokens=4, do_sample=False)
    model_of(name).generate(**ask(name, image=1), max_new_tokens=1)
    assert torch.equal(store.generate(model_of(name), **batch, max_new_tokens=4, do_sample=False), expected)
    assert store.stats().hits == 3


def test_a_film_is_found() -> None:
    inputs, placeholders = film(0)
    ids = torch.tensor([[5, 6, *[PLACEHOLDER - 1] * placeholders, 7, 8, 9]])
    types = 2 * (ids == PLACEHOLDER - 1).long()
    asked = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "mm_token_type_ids": types, **inputs}
    for name in ("Qwen2VL", "Qwen2_5_VL"):
        store = PrefixStore.for_model(model_of(name), block_size=SIZE)
        check_same(name, store, asked, hit=False)
        check_same(name, store, asked, hit=True)
        check_same(name, store, {**asked, "pixel_values_videos": film(1)[0]["pixel_values_videos"]}, hit=False)


def by_generate(store: PrefixStore, inputs: dict[str, Tensor]) -> Tensor:
    return store.generate(store.model, **inputs, max_new_tokens=2, do_sample=False)


def by_prepare(store: PrefixStore, inputs: dict[str, Tensor]) -> Tensor:
    prepared = store.prepare(inputs)
    with prepared[CACHE_ARGUMENT] as cache:
        sequences = store.model.generate(**prepared, max_new_tokens=2, do_sample=False)
        cache.commit(sequences)
    return sequences


def by_cache(store: PrefixStore, inputs: dict[str, Tensor]) -> Tensor:
    text = {name: inputs[name] for name in ("input_ids", "attention_mask")}
    media = {name: value for name, value in inputs.items() if name not in text}
    with PrefixSharedCache(store.model.config, store, text["input_ids"], media=media) as cache:
        given = {} if cache.shared_tokens else media
        sequences = store.model.generate(**text, **given, **{CACHE_ARGUMENT: cache}, max_new_tokens=2, do_sample=False)
        cache.commit(sequences)
    return sequences


@pytest.mark.parametrize("entry", [by_generate, by_prepare, by_cache])
def test_only_the_same_is_found(entry: Callable[[PrefixStore, dict[str, Tensor]], Tensor], tmp_path: Path) -> None:
    """Every request has a store of its own over the files of the others."""
    asked = ask("Llava")
    requests = {
        "an image": asked,
        "another": ask("Llava", image=1),
        "of another dtype": {**asked, "pixel_values": asked["pixel_values"].float()},
    }

    def is_hit(inputs: dict[str, Tensor], **options: Any) -> bool:
        store = PrefixStore.open(f"file://{tmp_path / 'blocks'}", model_of("Llava"), block_size=SIZE, **options)
        expected = store.model.generate(**inputs, max_new_tokens=2, do_sample=False)
        assert torch.equal(entry(store, inputs), expected)
        assert not store.stats().file_problems
        assert store.stats().loaded_tokens == store.stats().hit_tokens
        return store.stats().hits == 1

    for name, inputs in requests.items():
        assert not is_hit(inputs), f"{name} found what is another's"
    assert not is_hit(asked, namespace="other")
    # Without the image these ids would be another text of the same name.
    with pytest.raises(InputError, match="placeholders"):
        is_hit({name: asked[name] for name in ("input_ids", "attention_mask")})
    for name, inputs in requests.items():
        assert is_hit(inputs), f"{name} did not find its own"
    PrefixStore.open(f"file://{tmp_path / 'blocks'}", model_of("Llava"), block_size=SIZE, namespace="other").clear(
        "other"
    )
    assert not is_hit(asked, namespace="other")
    assert is_hit(asked)


def test_a_history_that_ends_in_an_image_is_not_taken_up() -> None:
    """The last token of a prompt is always computed: where that is a placeholder, so is all the image."""
    store = PrefixStore.for_model(model_of("Gemma3"), block_size=SIZE)
    for _ in range(2):
        check_same("Gemma3", store, ask("Gemma3", after=0), hit=False)
    assert store.stats().misses == {"nothing_shared": 1, "media_not_covered": 1}
    for asked in (1, 6):
        check_same("Gemma3", store, ask("Gemma3", after=asked), hit=True)
    assert store.stats().hit_tokens == 2 * 9  # no question is like the first answer
    assert store.stats().blocks_in_use == 0


def test_what_fills_a_block_is_left_out() -> None:
    for head in range(1, 2 * SIZE + 1):
        media = Media("", head)
        for tokens in range(head, head + SIZE + 2):
            aligned = media.aligned(torch.arange(tokens), SIZE)
            places = range(0, len(aligned) // SIZE * SIZE + 1, SIZE)
            for middle in places:
                pieces = [(part, part) for part in (aligned[None, :middle], aligned[None, middle : places[-1]])]
                kept = [keys[0] for keys, _ in media.without_fill(pieces, SIZE)]
                real = media.real_tokens(places[-1], SIZE)
                assert torch.equal(torch.cat(kept), torch.arange(real))
            assert head <= real <= tokens
        assert torch.equal(media.aligned(torch.arange(head - 1), SIZE), torch.arange(head - 1))


def test_every_part_counts() -> None:
    """Whatever differs up to the last placeholder makes another digest; what comes after it does not."""
    model = model_of("Qwen2VL")
    asked = ask("Qwen2VL")

    def digest_of(**changed: Any) -> str:
        inputs = {**asked, **changed}
        media = read_media(model.config, inputs.pop("input_ids"), inputs.pop("attention_mask"), inputs)
        assert media is not None
        return media.digest

    pixels, ids, types = asked["pixel_values"], asked["input_ids"], asked["mm_token_type_ids"]
    nudged = pixels.clone()
    nudged[0, 0] += 1e-9
    first, moved, typed = ids.clone(), ids.roll(1), types.clone()
    first[0, 0] += 1
    typed[0, 0] = 1
    variants = [
        {},
        {"pixel_values": nudged},
        {"pixel_values": pixels.float()},
        {"pixel_values": pixels[None]},
        {"pixel_values": None, "pixel_values_videos": pixels},
        {"pixel_values": [pixels]},
        {"image_grid_thw": torch.tensor([[1, 8, 2]])},
        {"image_grid_thw": None},
        {"input_ids": first},
        {"input_ids": moved, "mm_token_type_ids": types.roll(1)},
        {"mm_token_type_ids": typed},
        {"mm_token_type_ids": None},
    ]
    assert len({digest_of(**changed) for changed in variants}) == len(variants)
    longer = torch.cat([ids[:, :-1], ids[:, :3]], dim=1)
    more = {"input_ids": longer, "attention_mask": None, "mm_token_type_ids": (longer == PLACEHOLDER).long()}
    assert digest_of(**more) == digest_of()


def test_what_is_not_known_is_refused() -> None:
    model, asked = model_of("Gemma3"), ask("Gemma3")
    store = PrefixStore.for_model(model, block_size=SIZE)
    ids, mask, types = asked["input_ids"], asked["attention_mask"], asked["token_type_ids"]
    padded = {
        "input_ids": torch.nn.functional.pad(ids, (2, 0)),
        "attention_mask": torch.nn.functional.pad(mask, (2, 0)),
    }
    padded["token_type_ids"] = torch.nn.functional.pad(types, (2, 0))
    refused: list[tuple[str, dict[str, Any]]] = [
        ("leave mm_encoder_outputs out", {"mm_encoder_outputs": {"image": None}}),
        ("leave inputs_embeds out", {"inputs_embeds": noise(1, 17, 32, seed=0)}),
        ("leave position_ids out", {"position_ids": torch.arange(17)[None]}),
        ("leave image_sizes out", {"image_sizes": torch.tensor([[8, 8]])}),
        ("one by one", {name: torch.cat([of, of]) for name, of in asked.items()}),
        ("one by one", padded),
        ("shape of input_ids", {"token_type_ids": types[:, 1:]}),
        ("no token of input_ids", {"input_ids": ids.clamp(max=50)}),
        ("tensors and numbers", {"pixel_values": {"of": "what"}}),
        ("in one piece", {"prefill_chunk_size": 4}),
    ]
    for message, changed in refused:
        with pytest.raises(InputError, match=message):
            store.generate(model, **{**asked, **changed}, max_new_tokens=1)
        if "prefill_chunk_size" not in changed:
            with pytest.raises(InputError, match=message):
                store.prepare({**asked, **changed})
    with pytest.raises(InputError, match="a text of llama by its input_ids; leave pixel_values, token_type_ids out"):
        PrefixStore.for_model(tiny_model("llama")).prepare(asked)
    assert store.stats().prompt_tokens == store.stats().blocks == 0
    by_generate(store, asked)
    with pytest.raises(StateError, match="images"):
        store.generate(model, **asked, max_new_tokens=4, prompt_lookup_num_tokens=2)
    assert store.stats().blocks_in_use == 0
