"""Print an answer as it is made: python examples/stream.py [ADDRESS]"""

import asyncio
import sys

from paged.client import Client, chat


async def main(address: str) -> None:
    async with Client(address) as client:
        async for message in client.generate("Once upon a time", max_tokens=32, temperature=0.8, seed=1):
            print(message.text, end="", flush=True)
            if message.HasField("finish"):
                print(f"\n[{message.usage.completion_tokens} tokens]")

        model = await client.model()
        if model.has_chat_template:
            question = chat(("system", "Answer in one sentence."), ("user", "What is a block table?"))
            answer = await client.complete(question, max_tokens=64, temperature=0)
            print(answer.text)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:] or ["127.0.0.1:50051"]))
