"""What a pick costs: CPU and latency the EPP adds, beside Envoy alone and a server that understands nothing.

Three variants run by turns in one set-up: Envoy alone; Envoy asking a bare server (the EPP's transport and messages, a
constant answer); Envoy asking the EPP. Only ratios mean anything: absolute figures are the machine's. The EPP has a
core for itself, everything else shares another. Prompts are conversations: a quarter of each shared by all, half by
its conversation, a quarter never seen before.
"""

import argparse
import json
import signal
import sys
from collections.abc import Sequence

from hack.benches.rig import report
from hack.benches.rig.pickers import EPP, Rig, Scenario, Setup, Variant, idle, in_turns, measured, rig
from hack.benches.rig.processes import BenchError

BARE = "{python} -m hack.benches.rig.bare_server --port {grpc_port} --destination {destination}"
PODS = 8
SCENARIOS = (
    Scenario("2 KB", 2 << 10, "chat"),
    Scenario("32 KB", 32 << 10, "chat"),
    Scenario("256 KB", 256 << 10, "chat"),
    Scenario(report.STREAMED, 2 << 10, "streamed completions", 3.0),
    Scenario(report.LATE, 2 << 10, "completions", 3.0),
)


def one_round(rig: Rig, seconds: float, turn: int) -> dict[tuple[str, str], report.Sample]:
    """A sample of every scenario with every variant."""
    return {
        (scenario.name, variant.name): _sample(rig, scenario, variant, seconds * scenario.stretch)
        for scenario, variant in in_turns(rig, SCENARIOS, turn)
    }


def _sample(rig: Rig, scenario: Scenario, variant: Variant, seconds: float) -> report.Sample:
    busy_epp, busy_envoy, busy = measured(rig, scenario, variant, 16, seconds)
    if scenario.api != "chat":  # slow answers: even many of them leave the machine unhurried
        return report.Sample(busy_epp, busy_envoy, busy_epp, busy.p50, busy.p99)
    single_epp, _, single = measured(rig, scenario, variant, 1, seconds)
    return report.Sample(busy_epp, busy_envoy, single_epp, single.p50, single.p99)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="hack/bench picker", description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--quick", action="store_true", help="some 40 s and rough figures; else about 4 minutes")
    parser.add_argument("--rounds", type=int, help="default: 8; quick: 2")
    parser.add_argument("--json", action="store_true", help="print all figures as JSON instead of a table")
    parser.add_argument("--epp-command", default=EPP, help="how to start the EPP; default: %(default)s")
    flags = parser.parse_args(arguments)
    rounds, seconds = flags.rounds or (2 if flags.quick else 8), 0.2 if flags.quick else 0.6
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what was started ends
    try:
        commands = {"bare server": BARE, "epp": flags.epp_command}
        setup = Setup(commands, report.WIRINGS, SCENARIOS, PODS, 64 if flags.quick else 240)
        with rig(setup, needed=[*commands]) as running_rig:
            found, idling = _run(running_rig, rounds, seconds)
    except BenchError as error:
        print(f"hack/bench picker: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    if flags.json:
        print(json.dumps({"rounds": rounds, "idle_core_share": idling, "figures": found}, indent=1))
        return 0
    print(report.table(found, rounds))
    print(f"idle, with {PODS} endpoints: {idling * 100:.2f} % of a core")
    print("\n".join(report.verdicts(found)))
    return 0


def _run(rig: Rig, rounds: int, seconds: float) -> tuple[report.Summary, float]:
    if not rig.alone_core:
        print("only one core, or no taskset: everything shares it, so latencies say little", file=sys.stderr)
    one_round(rig, 0.15, 0)  # warm: connections, caches, the first of every code path
    idling = idle(rig.servers["epp"], 2.0)
    samples = []
    for turn in range(rounds):
        print(f"round {turn + 1} of {rounds}", file=sys.stderr)
        samples.append(one_round(rig, seconds, turn))
    return report.summary(samples, [scenario.name for scenario in SCENARIOS]), idling


if __name__ == "__main__":
    sys.exit(main())
