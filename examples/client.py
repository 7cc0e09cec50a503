"""Asks as any OpenAI client does, streaming, and prints how long the same prompt's first token takes, twice.

Usage: client.py [BASE_URL]
"""

import sys
import time

from openai import OpenAI

QUESTION = "Summarise this. " + "Requests that begin alike are sooner answered where the first of them went. " * 60


def main(base_url: str) -> None:
    client = OpenAI(base_url=base_url, api_key="none")
    model = client.models.list().data[0].id
    for asked in ("first", "again"):
        start = time.perf_counter()
        stream = client.chat.completions.create(
            model=model, messages=[{"role": "user", "content": QUESTION}], max_tokens=16, stream=True
        )
        chunks = iter(stream)
        next(chunks)
        first = time.perf_counter() - start
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        print(f"{asked}: first token after {first * 1000:.0f} ms; …{text[-40:]}")


if __name__ == "__main__":
    main(*sys.argv[1:] or ["http://127.0.0.1:8080/v1"])
