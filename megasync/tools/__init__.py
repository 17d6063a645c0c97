"""Verbs beside training, a room each under the verb's name. They import the trainer; the trainer imports none of them.

assets/         a model and data to try training with
export/         a run's weights as a Hugging Face folder
serving/        weights of a run or folder, served for the four verbs below
generate/       responses to prompts
evaluate/       held-out results with confidence intervals
replay/         what a step was trained on, sampled again
bisect/         the first module whose outputs differ between trainer and replica
plan/           memory and seconds of a run, before it starts
doctor/         whether this machine is fit for a run
report/         a run's report.html
scale/          more or fewer replicas for a run that trains
import_config/  configs of verl and TRL
quickstart/     model, data, warm-up and RL in one command
"""
