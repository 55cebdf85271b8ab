#!/bin/bash
# Train on nodes of a Slurm cluster: save when the time is over or the job is preempted, queue again, and go on.
#
#     RUN_DIR=/shared/NAME sbatch launch/slurm.sh model=mixtral_8x7b mesh.fsdp=2 mesh.expert=8 batch_size=64
#
# Arguments are settings of moezoo. Options of sbatch, such as --nodes=4 --time=2:00:00, replace those below. One process
# runs all GPUs of a node; with --ntasks-per-node=8 each GPU has its own. Variables, with their defaults:
#
#     RUN_DIR       the folder of the run, on a file system that all nodes share, or gs://BUCKET/NAME
#     TRAIN         "moezoo train": the command, as in TRAIN="apptainer exec --nv moezoo.sif moezoo train"
#     MAX_RESTARTS  20: how often the job is queued before a lost process ends it
#
#SBATCH --job-name=moezoo
#SBATCH --output=%x-%j.out
#SBATCH --open-mode=append
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --time=24:00:00
#SBATCH --requeue
# To the processes, not to this script, five minutes before the end: enough for a step and a save.
#SBATCH --signal=TERM@300
set -euo pipefail

: "${SLURM_JOB_ID:?submit this file with sbatch}"
: "${RUN_DIR:?the folder of the run, such as /shared/NAME, which all nodes reach}"
read -ra train <<< "${TRAIN:-moezoo train}"
restarts=${SLURM_RESTART_COUNT:-0}

# Under Slurm JAX gives each process one GPU. A process that is alone on its node takes all of them.
if [ "${SLURM_NTASKS_PER_NODE:-1}" -eq 1 ] && [ -n "${SLURM_GPUS_ON_NODE:-}" ]; then
  JAX_LOCAL_DEVICE_IDS=$(seq -s, 0 $((SLURM_GPUS_ON_NODE - 1)))
  export JAX_LOCAL_DEVICE_IDS
fi
# srun does not read what sbatch has of --cpus-per-task.
if [ -n "${SLURM_CPUS_PER_TASK:-}" ]; then export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK; fi

# Each process reports in its own lines why it ends, so no process is killed because another one has ended.
code=0
srun --label --kill-on-bad-exit=0 \
  "${train[@]}" "$@" "run_dir='${RUN_DIR//\'/\\\'}'" resume=auto distributed=auto || code=$?

# docs/clusters.md explains the exit codes.
case $code in
  0) echo "job $SLURM_JOB_ID: done" ;;
  143) # stopped by SIGTERM, and saved
    echo "job $SLURM_JOB_ID: queued again, to go on from its newest checkpoint"
    scontrol requeue "$SLURM_JOB_ID" ;;
  3 | 134 | 135 | 137 | 139) # a process was lost: ended by another one's death, by a crash or by the system
    if [ "$restarts" -ge "${MAX_RESTARTS:-20}" ]; then
      echo "job $SLURM_JOB_ID: a process was lost (exit code $code) after $restarts restarts; not queued again" >&2
      exit "$code"
    fi
    echo "job $SLURM_JOB_ID: a process was lost (exit code $code); queued again, restart $((restarts + 1))"
    scontrol requeue "$SLURM_JOB_ID" ;;
  *)
    echo "job $SLURM_JOB_ID: exit code $code, which starting again would not change" >&2
    exit "$code" ;;
esac
