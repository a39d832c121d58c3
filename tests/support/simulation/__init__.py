"""A deterministic simulation of servers, clients and faults.

One seed decides a whole *history*: the order in which threads run, the clock, the faults, and what clients send. The
method is the same as in FoundationDB's simulation, TigerBeetle's VOPR and madsim. A history takes about 0.1 s, and the
same seed gives the same history, event by event.

The product runs: `Engine.run` and its threads, the writers of the stores, the status publisher, the result watcher, the
event loop of long polls, the endpoints below HTTP, the supervisor, and the fake backend. Simulated are:

- **Threads** (`scheduler`). Each is an operating system thread, and only one runs at a time. A thread passes its
  turn when it waits for a lock, an event, a future, a queue, the clock or the device. The next
  thread is drawn at random.
- **Clocks** (`scheduler`). Virtual; they advance when all threads wait. The wall clock and the monotonic clock differ
  after a suspend or a step. Reads, commits and calls of the device take a random time.
- **Modules** (`substitutes`). Names of the product's modules that refer to `time`, `threading`, `secrets`, `os` and so
  on refer to the simulated ones while a history runs. The product has no hooks for this, apart from its failpoints.
- **Database** (`database`). SQLite in memory, shared by all processes, through the product's own dialect and
  statements, which `statements` executes with less work. Commits are atomic and durable; I/O errors, a full disk and
  older copies are faults.
- **Disk** (`disk`). Artifacts are real files in memory. Writes and flushes fail, and a loss of power keeps what `fsync`
  promised, and of the rest what chance decides.
- **Device** (`device`). The fake backend, which may be lost, sick or hang at any call, and on which a pass may crash.
- **Processes and network** (`world`). One or two APIs, an engine, the product's supervisor; messages that are lost,
  repeated and delayed. A killed process leaves what it wrote.
- **Clients** (`clients`, `scenarios`). They send requests in groups and out of order, send them again, poll slowly,
  cancel samples, and ask for rows of other owners.

At the end (`oracle`) a model of each client's requests, which is the fake backend driven in one thread, says what every
result, log sequence number, sample and saved file must be. All requests must have their results a bounded time after
the last fault, and none may fail because of a fault in another request.

The kinds of faults are in `faults.KINDS`; `mutations` takes guarantees out of the product, and a test checks that the
histories miss each.
"""
