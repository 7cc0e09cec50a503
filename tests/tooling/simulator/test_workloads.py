"""The generators, and that the demo's mix shows what it is meant to show."""

import heapq
from collections.abc import Callable
from statistics import median

from tooling.simulator import tokenizer as tokens
from tooling.simulator import workloads
from tooling.simulator.answers import Wish, answer
from tooling.simulator.engine import LAPTOP, Engine, Job
from tooling.simulator.workloads import Session


def prompt_tokens(session: Session) -> int:
    return tokens.count(tokens.render_chat(session.messages([])))


def test_a_turn_contains_the_answers_so_far() -> None:
    (session,) = workloads.chats(1, sessions=1, turns=3, seconds=1.0)
    first, second, third = (session.messages(["one"] * reported) for reported in range(3))
    assert [message["role"] for message in third] == ["system", "user", "assistant", "user", "assistant", "user"]
    assert second[:2] == first
    assert third[:4] == second
    assert second[2]["content"] == "one"
    assert [message["content"] for message in third[1::2]] == [turn.text for turn in session.turns]


def test_equal_seeds_equal_workloads() -> None:
    makers: list[Callable[[int], list[Session]]] = [
        lambda seed: workloads.chats(seed, sessions=3, turns=2, seconds=5.0),
        lambda seed: workloads.documents(seed, documents=3, questions=9, seconds=5.0),
        lambda seed: workloads.burst(seed, requests=3),
        lambda seed: workloads.independent(seed, requests=3, seconds=5.0),
        workloads.demo,
    ]
    for make in makers:
        assert make(1) == make(1) != make(2)
        sessions = make(1)
        assert len({session.id for session in sessions}) == len(sessions)
        assert [session.starts_at for session in sessions] == sorted(session.starts_at for session in sessions)


def test_chats_share_their_system_prompt_and_nothing_else() -> None:
    sessions = workloads.chats(1, sessions=5, turns=2, seconds=3.0, system_tokens=100, question_tokens=10)
    assert len({session.system for session in sessions}) == 1
    assert len({turn.text for session in sessions for turn in session.turns}) == 10
    assert all(0.5 <= turn.pause <= 1.5 for session in sessions for turn in session.turns)
    assert {prompt_tokens(session) - 110 for session in sessions} == {14}, "the template's own tokens"


def test_documents_have_a_few_favourites() -> None:
    sessions = workloads.documents(1, documents=4, questions=400, seconds=10.0, skew=1.0)
    counts = sorted(sum(other.system == text for other in sessions) for text in {s.system for s in sessions})
    assert len(counts) == 4
    assert 1.3 < counts[-1] / counts[-2] < 3
    assert all(0 <= session.starts_at <= 10 for session in sessions)


def test_a_burst_is_one_prompt_at_one_moment() -> None:
    sessions = workloads.burst(1, requests=30, at=2.0)
    assert {session.starts_at for session in sessions} == {2.0}
    assert len({session.turns for session in sessions}) == 1


def test_independent_prompts_share_nothing() -> None:
    sessions = workloads.independent(1, requests=50, seconds=10.0, prompt_tokens=400)
    assert len({session.turns[0].text[:64] for session in sessions}) == 50
    assert all(200 <= prompt_tokens(session) <= 615 for session in sessions)


class Pods:
    """Three engines in virtual time, fed by a rule that names the pod for a session's request."""

    def __init__(self, pick: Callable[[Session, int], int]) -> None:
        self.pick = pick
        self.engines = [Engine(LAPTOP) for _ in range(3)]
        self.jobs: list[Job] = []

    def play(self, sessions: list[Session]) -> None:
        """Run until all is answered."""
        order = 0
        due: list[tuple[float, int, Session, list[str]]] = []
        for session in sessions:
            due.append((session.starts_at, order, session, []))
            order += 1
        heapq.heapify(due)
        asked: dict[str, tuple[Session, list[str]]] = {}
        ready = [0.0, 0.0, 0.0]
        while due or asked:
            pod = min(range(3), key=lambda index: (ready[index], index))
            now = ready[pod]
            while due and due[0][0] <= now:
                at, number, session, answers = heapq.heappop(due)
                chosen = self.engines[self.pick(session, number)]
                asked[str(number)] = self.ask(chosen, str(number), at, session, answers)
            step = self.engines[pod].step(now)
            if step is None:
                others = [time for index, time in enumerate(ready) if index != pod and time > now]
                ready[pod] = min([*others, due[0][0]] if due else others, default=now + 0.01)
                continue
            ready[pod] = step.ends_at
            for job in step.finished:
                session, answers = asked.pop(job.id)
                if len(answers) < len(session.turns):
                    heapq.heappush(due, (step.ends_at + session.turns[len(answers)].pause, order, session, answers))
                    order += 1

    def ask(
        self, engine: Engine, name: str, at: float, session: Session, answers: list[str]
    ) -> tuple[Session, list[str]]:
        prompt = tokens.render_chat(session.messages(answers))
        said = answer(prompt, Wish(session.turns[len(answers)].max_tokens), (0,))
        chain = tokens.hash_chain(prompt + said.generated, LAPTOP.block_size)
        sizes = {"prompt": tokens.count(prompt), "output": tokens.count(said.generated)}
        self.jobs.append(engine.add(name, chain, prompt=sizes["prompt"], output=sizes["output"], now=at))
        return session, [*answers, said.text]

    def first_tokens(self) -> list[float]:
        """Seconds to the first token, of every request."""
        return [job.first_token_at - job.arrived_at for job in self.jobs if job.first_token_at is not None]

    def hit_rate(self) -> float:
        return sum(job.cached for job in self.jobs) / sum(job.prompt for job in self.jobs)


def test_the_demo_rewards_sending_requests_where_their_prefix_is() -> None:
    sessions = workloads.demo()
    homes = {text: index % 3 for index, text in enumerate(dict.fromkeys(session.system for session in sessions))}

    def home(session: Session, number: int) -> int:
        return int(session.id.split("-")[1]) % 3 if session.id.startswith("chat") else homes[session.system]

    around, aware = Pods(lambda session, number: number % 3), Pods(home)
    for pods in (around, aware):
        pods.play(sessions)
        assert len(pods.first_tokens()) == sum(len(session.turns) for session in sessions) == 107
        assert max(job.ended_at or 0 for job in pods.jobs) < 20
    assert aware.hit_rate() > 1.5 * around.hit_rate()
    assert median(aware.first_tokens()) < median(around.first_tokens()) / 3


def test_the_demo_fits_three_caches_but_not_one() -> None:
    texts = {session.system for session in workloads.demo()}
    held = sum(tokens.count(tokens.encode(text)) for text in texts)
    assert LAPTOP.capacity < held < 2.5 * LAPTOP.capacity
