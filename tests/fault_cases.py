"""The known troubles of programs like this one: what went wrong elsewhere, and who told of it.

What may live here: the registry. A test that shows a trouble to be met carries the mark
`fault(case, phase, does)`; fault_table.py makes docs/faults.md of the marks and of this.

SV: cases from supervisors of processes, in the order of the life of one. FC: cases from people who
train models, of which those about signals, processes and hangs are kept here. A `reason` says why
a case cannot come up in this product; a case with a reason has no test.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

TROUBLE_CHARACTERS_MAX: Final = 76


@dataclass(frozen=True, slots=True)
class Case:
    trouble: str
    threads: str
    reason: str = ""


GROUPS: Final[dict[str, dict[str, Case]]] = {
    "Orphans and trees": {
        "SV-1": Case(
            "children went on living after their daemon was told to end",
            "circus #998",
        ),
        "SV-2": Case("grandchildren outlived a stop", "circus #214, #986"),
        "SV-3": Case(
            "the daemon was killed, and what it had started ran on unowned",
            "supervisord #168, PR 199",
        ),
        "SV-4": Case(
            "a grandchild kept the port, and the next start failed for it",
            "pm2 #6084, #1588",
        ),
        "SV-5": Case(
            "a signal to the launcher never got to what it had launched",
            "foreman #628, honcho PR 32",
        ),
        "SV-6": Case(
            "data workers of a killed trainer lived on and held GPU memory",
            "pytorch #5736, #1085, #8805",
        ),
        "SV-7": Case(
            "the port was free at once and the GPU was not: out of memory next time",
            "vllm #55510, PR 34816, PR 55846",
        ),
        "SV-8": Case(
            "a stuck worker kept the device open, and its memory did not come back",
            "Megatron-LM PR 3684",
        ),
        "SV-9": Case(
            "a signal reached the direct child and nobody below it",
            "pytorch PR 113231",
        ),
        "SV-10": Case(
            "a walk from parent to child missed orphans, and could hit strangers",
            "psutil #2534, #314",
        ),
        "SV-11": Case(
            "a kill of a tree took its own launcher and a stranger's session along",
            "TensorRT-LLM PR 16404",
        ),
        "SV-12": Case(
            "each restart of an outer manager interrupted the training under it",
            "PortOS #1319",
        ),
        "SV-13": Case(
            "whoever inherited orphans ignored them, or left them as zombies",
            "tini #95, dumb-init #212, bun PR 29930",
        ),
    },
    "Parent death": {
        "SV-14": Case(
            "a child was killed because the thread that had started it ended",
            "bubblewrap #692, python-prctl #14, UniRL PR 276",
        ),
        "SV-15": Case(
            "a child took 'my parent is process 1' for 'my parent is dead'",
            "ipykernel #517, PR 233, PR 1271",
        ),
        "SV-16": Case(
            "a watcher in Python could not run while native code held the interpreter",
            "TensorRT-LLM PR 18030",
        ),
        "SV-17": Case(
            "Python code between fork and exec deadlocked in a threaded parent",
            "cpython #82616, gprofiler PR 931, KiroCrew #935",
        ),
    },
    "Signals": {
        "SV-18": Case(
            "SIGTERM during the start was ignored, until everything was killed",
            "circus #935",
        ),
        "SV-19": Case("SIGHUP called off a shutdown that was under way", "supervisord 3.3.5"),
        "SV-20": Case(
            "what was stopping already could not be killed any more",
            "supervisord #734, #1073",
        ),
        "SV-21": Case("a wrapper ended before its child had cleaned up", "tini #78"),
        "SV-22": Case(
            "a library took SIGUSR1 for itself, and requests for checkpoints vanished",
            "nccl #704, submitit #1709",
        ),
        "SV-23": Case(
            "a save that was begun inside a signal handler sometimes never ended",
            "pytorch-lightning #21406",
        ),
        "SV-24": Case(
            "requests were looked at between steps only, and none was saved in time",
            "goodfire-ai/spd #677, #741",
        ),
        "SV-25": Case(
            "a signal to the group killed the data workers, and with them the save",
            "KempnerForge #177",
        ),
        "SV-26": Case(
            "no Python handler runs while the main thread is in native code",
            "cpython #85300",
        ),
        "SV-27": Case(
            "a signal to a forked worker was taken for one to its parent",
            "ace PR 1425",
        ),
        "SV-28": Case(
            "the trainer took note of SIGTERM, and trained on for ever",
            "IsaacLab #6530",
        ),
        "SV-29": Case(
            "SIGUSR1 killed a program that had not installed its handler yet",
            "signal(7): the default action",
        ),
    },
    "Stop and restart races": {
        "SV-30": Case("a stop and a reaping got in each other's way", "circus #658, #690"),
        "SV-31": Case(
            "the restarter revived what somebody was shutting down",
            "jupyter_client PR 607, PR 576",
        ),
        "SV-32": Case(
            "restarts killed their watcher, met nobody, or left half a start behind",
            "distributed #7312, #3955, #6426",
        ),
        "SV-33": Case(
            "'no such process' during a kill led to a state without a way out",
            "supervisord #536, #445",
        ),
        "SV-34": Case("an unknown child was reaped, and the daemon ended", "supervisord #936"),
        "SV-35": Case(
            "a child that nothing can kill blocked the one who waited for it",
            "pytorch PR 185414, moby #22802",
        ),
        "SV-36": Case(
            "a death during the start went unnoticed until a huge timeout",
            "papermill #125, jupyter_client #7, TensorRT-LLM PR 17578",
        ),
    },
    "Restart storms": {
        "SV-37": Case(
            "what died just after its start was started again at once, without end",
            "supervisord #1285, #1189, #487; circus #1155",
        ),
        "SV-38": Case(
            "retries without a delay spent the whole budget in an instant",
            "erlang/otp PR 1287",
        ),
        "SV-39": Case(
            "once the limit was met, a start by hand was refused too",
            "multipath-tools #100",
        ),
        "SV-40": Case(
            "what never got going was started again and again, its error lost in noise",
            "pytorch #60910",
        ),
        "SV-41": Case(
            "restarts went round and round on a damaged newest checkpoint",
            "llnl/scr #174, speculators PR 739, allennlp #2129",
        ),
        "SV-42": Case(
            "a budget that never refills ended a long and healthy run",
            "2389-research/tracker #643",
        ),
    },
    "Hang detection": {
        "SV-43": Case("a save was taken for a hang", "FlagScale PR 1267"),
        "SV-44": Case(
            "slow starts were killed: the watch began before the start was over",
            "kubernetes #27114, monit #787",
        ),
        "SV-45": Case(
            "a heartbeat of a helper thread hid a hang; one of the work loop faked one",
            "IRkernel #164",
        ),
        "SV-46": Case(
            "a hang was found, and the graceful way out of it hung too",
            "TensorRT-LLM PR 15612",
        ),
        "SV-47": Case(
            "a machine that slept, or a clock set back, set off the watchdog",
            "systemd #20284, #9538; supervisord #1043, #802, #281",
        ),
        "SV-48": Case("an option was in the help, and nothing used it", "aprender #521"),
    },
    "Logs": {
        "SV-49": Case(
            "output that was not UTF-8 closed the log and then blocked the child",
            "supervisord #638",
        ),
        "SV-50": Case(
            "the supervisor died, its pipe broke, and the next print killed the child",
            "pitchfork PR 661",
        ),
        "SV-51": Case(
            "the last lines before an end were lost; a silent child held everything up",
            "circus #557, #1095",
        ),
        "SV-52": Case("output was seen minutes after it was written", "supervisord #803, #1394"),
        "SV-53": Case(
            "descriptors leaked at every rotation; more than 1023 was a crash",
            "supervisord #1440, #184, #1003, #26, #489",
        ),
        "SV-54": Case(
            "a log that was missing, or a disk that was full, ended the daemon",
            "supervisord #629, #1648, PR 402; dd-agent #2149",
        ),
        "SV-55": Case(
            "a closed descriptor stayed in the poller, and took a whole processor",
            "supervisord #807",
        ),
    },
    "Control channel": {
        "SV-56": Case(
            "a second server took the socket over, in silence", "pyzmq #209, libzmq #2059"
        ),
        "SV-57": Case(
            "socket files were left behind, or removed under a living server",
            "libzmq #3204; supervisord #480, #1723",
        ),
        "SV-58": Case(
            "no socket could be made under a path of more than 107 bytes",
            "LMCache PR 3530, libzmq PR 1176, sglang-omni PR 768",
        ),
        "SV-59": Case(
            "a client waited for ever for a server that was dead", "libzmq #1227, netmq #906"
        ),
        "SV-60": Case(
            "a process could not end, because its context waited for peers",
            "pyzmq #102, #1002; libzmq #2586",
        ),
        "SV-61": Case(
            "the first messages, and those over a limit, were lost without a trace",
            "libzmq #2267, #2826, #4656, #4394",
        ),
        "SV-62": Case(
            "a late reply, or one to a name used twice, went nowhere",
            "libzmq #4503, #2019, #1575",
        ),
        "SV-63": Case("a socket that a fork had inherited misbehaved", "pyzmq #983, czmq #2038"),
        "SV-64": Case(
            "whatever had gone wrong, the only word for it was 'timed out'",
            "circus #135, #725, #1069, #380",
        ),
        "SV-65": Case("a retry after a timeout carried the command out twice", "prime-agent #821"),
        "SV-66": Case(
            "a socket was open to everybody until its permissions were set",
            "twisted #11389, browser-harness PR 309",
        ),
        "SV-67": Case(
            "messages could name or carry code, and it was executed",
            "sglang #24618, PR 21435; supervisord #964",
        ),
        "SV-68": Case(
            "a port was picked, let go, and lost to somebody else", "jupyter_client #276"
        ),
    },
    "Identity and state files": {
        "SV-69": Case(
            "a stale or garbled pid file barred the start, or pointed at a stranger",
            "aiida-core #2459, PR 4858; circus #866; monit #151, #563",
        ),
        "SV-70": Case(
            "a second start deleted the pid file of the first",
            "supervisord #878, circus #1080",
        ),
        "SV-71": Case(
            "a pid was used again, and a stop hit somebody else's program",
            "pitchfork PR 878, PR 632",
        ),
        "SV-72": Case(
            "between the check of an identity and the signal, the process changed",
            "psutil #286, #2888, #2400; cpython #127049, #86724",
        ),
        "SV-73": Case(
            "a forked child kept the lock, and the message named a dead process",
            "KiroCrew PR 810, aws-c-common PR 1192",
        ),
        "SV-74": Case("a full disk left an empty state file", "pm2 #2827, #2971, #1035"),
        "SV-75": Case(
            "an exit that nobody had seen was called a success, or a failure",
            "pitchfork PR 657",
        ),
        "SV-76": Case(
            "out of memory, the kernel killed the supervisor and not the hog",
            "balena-supervisor #39, supervisord PR 754",
        ),
        "SV-77": Case(
            "the notification socket of the service manager leaked to children",
            "gpud PR 1232, systemd PR 27297",
        ),
        "SV-78": Case("a daemon of 32 MB grew to gigabytes", "circus #732"),
    },
    "Loss history": {
        "SV-79": Case(
            "steps after a resume were recorded twice, or not at all",
            "wandb #6728, #1040; tensorboard #3732; tensorboardX #185",
        ),
    },
    "Field cases: full disks": {
        "FC-08": Case(
            "a full disk cut off the only good checkpoint, and a fix changed its mode",
            "NVIDIA/NVFlare PR 5011",
        ),
        "FC-16": Case(
            "a save that failed was thought to be there, and later ones were skipped",
            "AI-Hypercomputer/maxtext PR 5260",
        ),
        "FC-22": Case(
            "a disk that was full at the last save ended a long run",
            "bghira/SimpleTuner #2353; open-mmlab/mmdetection #12069",
        ),
    },
    "Field cases: signals, preemption, processes": {
        "FC-66": Case(
            "a launcher killed after 30 s, and a save takes longer than that",
            "pytorch/pytorch #119856, #68258",
        ),
        "FC-67": Case(
            "a launcher died of the user signal that asked it for a checkpoint",
            "pytorch/pytorch #154849",
        ),
        "FC-68": Case(
            "communication library and launcher wanted the same user signal",
            "facebookincubator/submitit PRs 1697, 1702; pytorch-lightning #14610",
        ),
        "FC-69": Case(
            "logging inside a handler raised errors of re-entrance",
            "facebookincubator/submitit #1714",
        ),
        "FC-70": Case(
            "checkpoint and requeue ran inside the handler, and workers died meanwhile",
            "pytorch-lightning PR 21407, #20280",
        ),
        "FC-71": Case(
            "SIGTERM to the group killed the data workers before the save",
            "allenai/olmoearth_pretrain PR 604; KempnerInstitute/KempnerForge #177",
        ),
        "FC-72": Case(
            "a shell around the launcher swallowed SIGTERM",
            "petuum/adaptdl #105; aws/deep-learning-containers #632;"
            " aws/sagemaker-training-toolkit #125",
        ),
        "FC-73": Case(
            "a second SIGTERM made a hard stop of a graceful one",
            "cockroachdb/cockroach #48070; HyperGAN/HyperGAN PR 341",
        ),
        "FC-74": Case(
            "SIGTERM was passed by: killed at the limit, with nothing saved",
            "pytorch-lightning #20542, #6626",
        ),
        "FC-75": Case(
            "a handler stayed after training, and swallowed a later SIGTERM",
            "NVIDIA-NeMo/Megatron-Bridge PR 5975",
        ),
        "FC-76": Case(
            "handlers cannot be installed from another thread than the main one",
            "pytorch-lightning #3651",
        ),
        "FC-77": Case(
            "the child of a stopped container was dead, the run marked as running",
            "unslothai/unsloth PR 11044",
        ),
        "FC-78": Case(
            "children outlived their parent and kept the device",
            "pytorch/pytorch #1223, #5736; pytorch-lightning #15008",
        ),
        "FC-79": Case(
            "a kill of a tree hit processes that had nothing to do with it",
            "NVIDIA/TensorRT-LLM PR 16404",
        ),
        "FC-80": Case(
            "a lock file outlived a crash and barred the next start",
            "ChrisCummins/clgen #116",
        ),
        "FC-81": Case(
            "two trainings in one directory wrote over each other",
            "deepinv/deepinv PR 550; TheCacophonyProject/classifier-pipeline #14",
        ),
    },
    "Field cases: hangs, crash loops, exit codes": {
        "FC-82": Case(
            "everything was 'running', without an error and without a step",
            "marin-community/marin #7344",
        ),
        "FC-83": Case(
            "a storage stalled, and the trainer stood idle for four days",
            "PrimeIntellect-ai/prime-rl PR 2142",
        ),
        "FC-84": Case(
            "a thread kept the heartbeat up while the work was stuck",
            "tomcounsell/ai #1226",
        ),
        "FC-85": Case("a long save was taken for a hang", "flagos-ai/FlagScale PR 1267"),
        "FC-86": Case(
            "the first step compiles, and tripped a deadline made for steady ones",
            "marin-community/marin PRs 7950, 8006; pytorch/torchtitan PR 149, PR 189",
        ),
        "FC-87": Case(
            "healthy jobs were ended for a stale heartbeat while they worked",
            "longtermrisk/openweights PR 82; sipyourdrink-ltd/bernstein #3012",
        ),
        "FC-88": Case(
            "a training that was over was started again from the beginning",
            "TuragaLab/DECODE #110",
        ),
        "FC-89": Case(
            "preemptions ate up the budget that is for failures",
            "skypilot-org/skypilot PR 4169",
        ),
        "FC-90": Case(
            "each respawn succeeded, and set the count back that should give up",
            "bobmatnyc/trusty-tools #3631",
        ),
        "FC-91": Case(
            "a loop of restarts hid their number, and kept the useless end of output",
            "defilantech/LLMKube #1856",
        ),
        "FC-92": Case(
            "a part was lost and the job went on, or all was torn down for one part",
            "skypilot-org/skypilot #3907, #1410",
        ),
    },
}

CASES: Final[dict[str, Case]] = {
    name: case for group in GROUPS.values() for name, case in group.items()
}
