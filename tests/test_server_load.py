"""Two hundred streams at once on SmolLM2, a third of them cancelled, three times over."""
import asyncio
import gc
import random
import time

import openai
import pytest
from server_tiny import is_at_rest, serve_in_thread

from minengine.config import EngineArgs
from minengine.llm import LLM
from minengine.sampling_params import SamplingParams
from minengine.server.launcher import make_async_engine

NUM_STREAMS, MAX_TOKENS = 200, 12
THINGS = ["rain", "bread", "the moon", "a bridge", "chess", "salt", "a river", "time", "a bicycle", "snow"]
PROMPTS = [f"{verb} {thing}" for thing in THINGS for verb in ("Explain", "A poem about", "The history of", "I like")]
# A pool that one round uses up: memory is real only after it was written to.
MEMORY = dict(num_gpu_blocks_override=400, max_model_len=1024, use_tqdm_on_load=False)


def memory_now() -> tuple[int, int]:
    "Python's objects, and bytes of this process."
    gc.collect()
    with open("/proc/self/statm") as f: return len(gc.get_objects()), int(f.read().split()[1]) * 4096


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["v1", "v0"])
def test_200_streams_a_third_of_which_are_cancelled(kind):
    llm = LLM(engine=kind, **MEMORY)
    greedy = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)
    wanted = [o.outputs[0].text for o in llm.generate(PROMPTS, greedy, use_tqdm=False)]
    llm.shutdown()
    del llm
    args = EngineArgs(engine=kind, enable_multiprocessing=False, disable_log_stats=False, **MEMORY)
    chosen, memory = random.Random(0), []
    with serve_in_thread(make_async_engine(args)) as server:
        async def one(client, i, leaves_after):
            stream = await client.completions.create(
                model="tiny", prompt=PROMPTS[i % len(PROMPTS)], max_tokens=MAX_TOKENS, temperature=0, stream=True)
            text, num_pieces = "", 0
            async for chunk in stream:
                if num_pieces == leaves_after:
                    await stream.close()
                    return None
                text, num_pieces = text + chunk.choices[0].text, num_pieces + 1
            return text

        async def one_round():
            leave = set(chosen.sample(range(NUM_STREAMS), NUM_STREAMS // 3))
            async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="-", max_retries=0, timeout=300) as client:
                texts = await asyncio.gather(*(one(client, i, chosen.randrange(MAX_TOKENS - 4) if i in leave else None)
                                               for i in range(NUM_STREAMS)))
            for i, text in enumerate(texts):
                if i not in leave: assert text == wanted[i % len(PROMPTS)], i

        for _ in range(3):
            start = time.monotonic()
            asyncio.run(asyncio.wait_for(one_round(), 400))
            while not is_at_rest(server.engine):   # the pool is whole
                assert time.monotonic() - start < 420
                time.sleep(0.05)
            assert not server.server.running.names
            memory.append(memory_now())
            print(f"{kind}: {time.monotonic() - start:.1f} s, {memory[-1][0]} objects, {memory[-1][1] / 2**20:.0f} MiB")
    # Nothing is kept of a request. What still grows is the arithmetic library's: it remembers each new batch size.
    assert abs(memory[2][0] - memory[1][0]) < 2000, memory
    assert memory[2][1] - memory[1][1] < 128 << 20, memory
