import subprocess
import sys

from gateway.child import with_parent


def test_the_command_runs_as_it_is() -> None:
    command = [sys.executable, "-c", "import sys; print(sys.argv[1:]); sys.exit(7)", "a b", "*"]
    done = subprocess.run(with_parent(command), capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (7, "['a b', '*']\n")


def test_a_command_whose_parent_is_gone_does_not_start() -> None:
    *wrapper, pid, echo, word = with_parent(["echo", "hello"])
    assert pid.isdigit()
    done = subprocess.run([*wrapper, "1", echo, word], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert "the parent is gone" in done.stderr
