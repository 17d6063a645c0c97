"""Generation of batches on rank 0: from prompts to rewarded samples.

Components, each with one purpose. Only Rollouts is known to the trainer, and only RolloutStream changes groups:

    Rollouts        makes groups of prompts and batches of groups; owns the stream and the records
    RolloutStream   groups from admission to batch; reads all events, and owns the components below
    EventThread     an asyncio loop in a thread, with the queue of events
    Dispatcher      hands groups to replicas; puts SamplesFinished, ReplicaLost, NotServing, RequestRefused
    Episodes        plays the members of groups; puts TurnAsked, EpisodeEnded
    Scorer          rewards of samples, which the stream puts as SamplesScored, with a teacher's scores (Teachers)

Dispatcher, Episodes and Scorer know neither the stream nor each other: their tasks end in events.

rollout.py     Rollouts
stream.py      RolloutStream
events.py      EventThread, and the events
dispatch.py    Dispatcher
turns.py       Episodes
attempt.py     one attempt at an episode
scoring.py     Scorer
scheduler.py   which groups begin, where, and which make a batch: pure functions
teachers.py    Teachers: scores of samples by models that are served beside the policy
filters.py     the user's own choice of groups that are trained
group.py       a prompt with its samples, or one turn of an episode
progress.py    groups in a checkpoint, as a file
restore.py     which of these a resumed run continues
records.py     trained groups, a file a step, from which they can be sampled again
requests.py    requests to replicas, inputs of rewards, lines of samples.jsonl
samples.py     samples for the trainer
metrics.py     metrics of a batch
evaluation.py  mean reward, avg@k and pass@k on held-out sets
"""
