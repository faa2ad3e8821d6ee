"""A real model whose device computes by itself: the order of things is another, what comes of them is not.

There is no such device here. The runner is told that it has one; it then computes at the launch, and what it has
computed must still be whole when it is read, after all that the loop has done meanwhile.
"""

from itertools import pairwise

import pytest

from executor_svc import step_cycle
from scheduler_svc.core.sequence import Sampling, Sequence
from tests.executor.device import Executor
from tests.model.conftest import Model, random_ids, settings_for
from tests.system.nodes import Link

NUM_OUTPUTS = 20
SAMPLINGS = (
    Sampling(),
    Sampling(temperature=1.0, seed=3, logprobs=2),
    Sampling(temperature=0.8, seed=4, repetition_penalty=1.2, frequency_penalty=0.3),
)


def serve(model: Model, *, overlaps: bool) -> tuple[list[list[int]], list[str]]:
    """The tokens of two schedulers' sequences, prompts in parts among them; and the executor's journal."""
    executor = Executor(overlaps=overlaps, settings=settings_for("-"), loaded=model.loaded)
    links = [Link(f"scheduler {number}", executor, executor.clock) for number in range(2)]  # type: ignore[arg-type]
    sequences = [
        Sequence(f"r{number}", random_ids(number, (3, 9, 50, 21)[number % 4]), NUM_OUTPUTS, SAMPLINGS[number % 3])
        for number in range(12)
    ]
    for number, sequence in enumerate(sequences):
        links[number % 2].submit(sequence)
    while any(link.core.state.num_running or link.core.state.num_waiting for link in links):
        for link in links:
            link.act()
            executor.router.deliver(link.connection)  # type: ignore[arg-type]
        executor.turn()
        executor.clock.now += 0.01
    return [sequence.token_ids[sequence.num_prompt :] for sequence in sequences], executor.journal


def test_a_model_says_the_same_whether_its_results_leave_before_the_next_step_or_during_it(
    llama: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_cycle, "STEPS_IN_TIME", 2)
    said, _ = serve(llama, overlaps=False)
    said_meanwhile, journal = serve(llama, overlaps=True)
    assert {len(tokens) for tokens in said} == {NUM_OUTPUTS}
    assert said_meanwhile == said
    during = sum(before.startswith("launch") and after.startswith("scheduler") for before, after in pairwise(journal))
    assert during > NUM_OUTPUTS, "results left while the next step was under way"
