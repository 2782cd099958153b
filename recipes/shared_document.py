"""Many questions about one document: computed once, held once, and in a batch read once for all of them.

    python recipes/shared_document.py

With the built-in model, SmolLM2-135M, and a document from the standard library. Prints the time to the first token of
every question, then the time and the bytes of all questions in one batch.
"""

import time

import torch

from hf_kvcache import PrefixStore
from hf_kvcache.evaluation.datasets import load_text
from hf_kvcache.evaluation.models import load_model

DOCUMENT_TOKENS = 1024
QUESTIONS = [
    "What is this text about?",
    "Which statement does it explain first?",
    "Give one example from the text.",
    "Who would read this?",
]


def main() -> None:
    """Ask the questions one after the other, then all at once."""
    model, tokenizer, _ = load_model("smollm2-135m")
    text = next(iter(load_text("stdlib")))
    document = tokenizer.decode(tokenizer(text[: 8 * DOCUMENT_TOKENS])["input_ids"][:DOCUMENT_TOKENS])
    prompts = [f"{document}\n\nQuestion: {question}\nAnswer:" for question in QUESTIONS]

    store = PrefixStore.for_model(model, capacity="1GiB")
    for question, prompt in zip(QUESTIONS, prompts, strict=True):
        inputs = tokenizer(prompt, return_tensors="pt")
        start = time.perf_counter()
        store.generate(model, **inputs, max_new_tokens=1, do_sample=False)
        seconds = time.perf_counter() - start
        print(f"first token after {seconds:6.3f} s, {store.stats().hit_tokens:5d} tokens found so far: {question}")

    tokenizer.padding_side = "left"
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    batch = tokenizer(prompts, return_tensors="pt", padding=True)
    prepared = store.prepare(batch)
    with next(value for value in prepared.values() if not isinstance(value, torch.Tensor)) as cache:
        start = time.perf_counter()
        sequences = model.generate(**prepared, max_new_tokens=24, do_sample=False)
        seconds = time.perf_counter() - start
        memory = cache.memory()
    for question, sequence in zip(QUESTIONS, sequences, strict=True):
        print(f"\n{question}\n  {tokenizer.decode(sequence[-24:], skip_special_tokens=True).strip()}")
    config = model.config
    token_bytes = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * model.dtype.itemsize
    alone = token_bytes * cache.get_seq_length() * len(QUESTIONS)
    print(f"\n{len(QUESTIONS)} answers at once in {seconds:.2f} s")
    print(f"held: {memory.total_bytes / 2**20:.1f} MiB; with a history for every row {alone / 2**20:.0f} MiB")
    print(store.stats())


if __name__ == "__main__":
    main()
