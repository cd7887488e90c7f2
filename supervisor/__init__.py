"""The supervisor: it owns a run of days or weeks, and everything on disk that the run consists of.

The map. A module imports only from its own layer and those before it. A trainer may import
contract, config, curriculum and link; nothing of `trainer` is imported here.

    0  foreign.py              bytes from somebody else: bounded, then checked
    0  contract.py             the words and shapes that cross a process boundary
    0  records.py              what the journal keeps
    0  events.py               what the machine hears and speaks

    1  projection.py           preferences to shares, shares to picks; arithmetic
    1  bandit.py               what losses say about arms: rewards, confidence, preferences
    1  policy.py               what a policy says of its arms, and whether it can be carried out
    1  curriculum_state.py     the curriculum between two steps, and its saved form
    1  mixture.py              the decision: what a state knows becomes shares
    1  coherence.py            how a text repeats itself: scores, no judgement of its content
    1  curriculum.py           which arm the next step trains on
    1  replay.py               what an attempt adds to the history, and what it only proves
    1  patience.py             how long a trainer may make no progress; learned, phase by phase
    1  notices.py              which facts are worth waking somebody for, and what he is told
    1  state.py                what the lifecycle knows
    1  blame.py                whether a checkpoint is to blame for a row of deaths
    1  causes.py               why an attempt ended, judged from what was seen
    1  moves.py                what its decisions are made of: start, spawn, stop, back off, end
    1  vigil.py                what silence leads to: evidence, then an end
    1  pivoting.py             a change of policy as one transaction, decided
    1  requests.py             what an operator's request leads to
    1  saving.py               a checkpoint from the news of it to its proof
    1  shortage.py             what a disk that is full or broken leads to
    1  machine.py              the lifecycle: decide(state, event), apply(record); no clock, no file

    2  schema.py               the settings: tables, keys, rules between values
    2  changes.py              what a run that exists says to other settings
    2  config.py               the settings: reading, checking, writing; the door to this layer

    3  durable.py              bytes that survive a kill, a power loss, a full disk
    3  rows.py                 where the rows of a ledger begin and end
    3  stretches.py            where in a ledger each of them stands
    3  ledger.py               the history: append-only, repaired on opening
    3  journal.py              rare facts, one checksummed line each
    3  proc.py                 what the kernel says of processes and locks
    3  rundir.py               the run directory: where things are, who owns it
    3  sidecars.py             status, samples, state, training, as their readers get them
    3  gauge.py                the live figures of a run: loss, its average, the rate
    3  recorder.py             receipts into the ledger and the sidecars
    3  readback.py             one checkpoint, proven from the device
    3  checkpoints.py          find, select, set aside, retain
    3  reclaim.py              what goes when there is no room, and in which order
    3  comparison.py           where two checkpoints of one step differ
    3  life.py                 which life of which run a trainer process is
    3  output.py               prints that a full disk may lose
    3  output_file.py         the file that --output names, replaced whole or written through
    3  receipt_file.py         the trainer's receipt file, whole lines in order
    3  tail.py                 the end of a log that somebody else writes

    4  worker.py               the one thread that waits for the disk
    4  commit.py               groups of writes, and the effects that wait for them
    4  archive.py              what a pivot writes: the archive, and the files of an epoch
    4  checkpoint_requests.py  what the helper process does with one request
    4  orphans.py              descendants without a parent, and children with an owner
    4  verifier.py             the helper process that reads and removes checkpoints
    4  cgroup.py               a control group for each attempt, where we may have one
    4  tree.py                 everything that belongs to one attempt
    4  child.py                one child process: started or adopted, signalled, waited for
    4  strays.py               what a dead attempt left, until that has ended too
    4  standing.py             where a silent trainer stands
    4  evidence.py             what there is to see of a death besides its status
    4  devices.py              the memory of GPUs that a dead attempt still has
    4  wire.py                 the two sockets of a supervisor
    4  link.py                 the trainer's side: receipts, requests, the exit record
    4  log.py                  the supervisor's own log
    4  attempt_logs.py         what becomes of the files that attempts print into
    4  channels.py             where notifications go, and whether they can
    4  notifier.py             the one short-lived process that delivers them
    4  webhook.py              that process, where it POSTs
    4  status.py               the status: composed by its supervisor, judged by its readers

    5  progress.py             what a person sees of a run in the foreground
    5  signals.py              signals to the supervisor, as counts that the loop reads
    5  sdnotify.py             what a service manager is told: ready, alive, ending
    5  parentage.py            who started this process: whether signals reach it
    5  attendant.py            the living attempt: its process, its lock, its death
    5  space.py                room on the disk: measured, said, made
    5  housekeeping.py         the errands to the helper process
    5  options.py              what one life of the supervisor is given to begin with
    5  reloading.py            settings read again at SIGHUP, while the trainer works on
    5  daemon.py               the one loop: wait, gather events, decide, make durable, act
    5  client.py               one operator request and its reply

    6  reexecution.py          a stretch of a run executed again and compared
    6  fork.py                 a new run out of a checkpoint of another
    6  exactness_commands.py   commands about exactness and its use
    6  data_check.py           what the trainer finds in the data of some settings
    6  pivot.py                what is checked before a pivot is asked for
    6  policy_commands.py      pivot, rollback, policy
    6  doctor.py               what on this machine would get in the way of a run
    6  ledger_proof.py         one pass over a ledger that forgives nothing
    6  checkpoint_proof.py     the verdict on one checkpoint, and where it is damaged
    6  repair.py               what may be done about damage: bad checkpoints set aside
    6  verify.py               a whole run, read back and compared with what was recorded
    6  history.py              exports of the history
    6  import_run.py           a run of another program becomes one of ours
    6  proof_commands.py       verify, history, import
    6  unit.py                 the systemd unit of a run: its text and its quoting
    6  service_commands.py     unit
    6  acceptance.py           what a start may change in a run that exists
    6  reread.py               what a life takes of the settings: at its start, and at SIGHUP
    6  start.py                the start command, before the loop and after it
    6  terminal.py             what all commands share
    6  control_commands.py     start, stop, restart, checkpoint
    6  view_commands.py        status, list, logs, samples, checkpoints, doctor
    6  cli.py                  the commands
    6  __main__.py             the entry point; loads what the command needs and no more

Reading order: contract, events, machine, daemon for how a run is kept alive; durable, ledger,
recorder for how a step is recorded; readback, checkpoints for what a resume may trust.
"""

__version__ = "0.1.0"
