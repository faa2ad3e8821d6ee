"""How busy the executors are, as operators are told: all together, and each."""

from collections.abc import Mapping

from paged.v1 import control_pb2
from scheduler_svc.answer import Outcome
from scheduler_svc.delivery import Delivery
from scheduler_svc.driver import Driver
from scheduler_svc.fleet import Fleet


def load_of(fleet: Fleet, outcomes: Mapping[Outcome, int], delivery: Delivery) -> control_pb2.GetLoadResponse:
    """`outcomes` says what has become of requests so far."""
    counters = fleet.counters
    states = [scheduler.state for scheduler in fleet.schedulers]
    pools = [state.cache.pool for state in states]
    return control_pb2.GetLoadResponse(
        running_sequences=sum(state.num_running for state in states),
        waiting_sequences=sum(state.num_waiting for state in states),
        peak_running_sequences=counters.peak_running,
        total_rows=sum(state.columns.num_leased for state in states),
        waiting_tokens=sum(state.queue.num_tokens for state in states),
        total_blocks=sum(pool.num_leased for pool in pools),
        used_blocks=sum(pool.num_used for pool in pools),
        cached_blocks=sum(pool.num_cached for pool in pools),
        peak_used_blocks=counters.peak_used_blocks,
        unused_slots=sum(state.unused_slots for state in states),
        peak_unused_slots=counters.peak_unused_slots,
        preemptions=counters.preemptions,
        finished_requests=outcomes["finished"],
        cancelled_requests=outcomes["cancelled"],
        failed_requests=outcomes["failed"],
        prompt_tokens=counters.prompt_tokens,
        cached_prompt_tokens=counters.cached_prompt_tokens,
        generated_tokens=counters.generated_tokens,
        not_finite_sequences=counters.not_finite,
        executor_losses=fleet.num_losses,
        executor_attached=any(model.executors for model in fleet.models),
        stream_messages=delivery.num_messages,
        streamed_tokens=delivery.num_tokens,
        result_to_write_s=control_pb2.Histogram(
            bounds=delivery.result_to_write_s.bounds,
            counts=delivery.result_to_write_s.counts,
            sum=delivery.result_to_write_s.sum,
        ),
        unread_bytes=delivery.unread_bytes,
        executors=[_executor_load(driver) for _, driver in sorted(fleet.drivers.items())],
    )


def _executor_load(driver: Driver) -> control_pb2.ExecutorLoad:
    state, attached = driver.scheduler.state, driver.attached
    counters, pool = state.counters, state.cache.pool
    return control_pb2.ExecutorLoad(
        endpoint=driver.endpoint,
        executor_id="" if attached is None else attached.executor_id,
        model="" if attached is None else attached.model.name,
        attached=driver.is_attached,
        losses=driver.num_losses,
        running_sequences=state.num_running,
        waiting_sequences=state.num_waiting,
        total_blocks=pool.num_leased,
        used_blocks=pool.num_used,
        cached_blocks=pool.num_cached,
        preemptions=counters.preemptions,
        prompt_tokens=counters.prompt_tokens,
        cached_prompt_tokens=counters.cached_prompt_tokens,
        generated_tokens=counters.generated_tokens,
        steps=driver.num_steps,
        step_us=driver.step_us,
        wait_us=driver.wait_us,
    )
