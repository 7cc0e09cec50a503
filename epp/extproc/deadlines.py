"""How long a stream may stay as it is: tasks that are cancelled unless they go on in time."""

import asyncio

Task = asyncio.Task[object]


class Deadlines:
    """Cancels each task that does not `stop` within `seconds` of its `start` (None = never), and all at `end`.

    One timer for all: they wait equally long, so they come due in the order they came. `asyncio.timeout` would make,
    move and cancel one for each stream.
    """

    def __init__(self, seconds: float | None = None) -> None:
        self._seconds = seconds
        self._due: dict[Task, float] = {}
        self._lost: set[Task] = set()
        self._timer: asyncio.TimerHandle | None = None

    def start(self, task: Task) -> None:
        if self._seconds is None:
            self._due[task] = 0.0
            return
        loop = task.get_loop()
        due = self._due[task] = loop.time() + self._seconds
        if self._timer is None:
            self._timer = loop.call_at(due, self._look)

    def stop(self, task: Task) -> None:
        """The task went on, or ends: to be called however it ends. A second call does nothing."""
        self._due.pop(task, None)
        self._lost.discard(task)

    def lost(self, task: Task) -> bool:
        """Whether the cancellation that `task` has just caught is ours, and the task's only one."""
        if task not in self._lost:
            return False
        self._lost.remove(task)
        return task.uncancel() == 0

    def end(self) -> None:
        """Cancel all tasks that wait now."""
        for task in list(self._due):
            self._lose(task)

    def _look(self) -> None:
        self._timer = None
        for task, due in list(self._due.items()):
            loop = task.get_loop()
            if due > loop.time():
                self._timer = loop.call_at(due, self._look)
                return
            self._lose(task)

    def _lose(self, task: Task) -> None:
        del self._due[task]
        self._lost.add(task)
        task.cancel()
