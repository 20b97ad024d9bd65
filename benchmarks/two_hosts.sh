#!/bin/bash
# The guide's commands for several machines, on two: network namespaces host1 and host2 of this
# machine, joined by a virtual cable. Trains, and loses a process, the cable and a machine.
#
#     bash benchmarks/two_hosts.sh    # from the repository's root, as root; six minutes, two cores
#
# Prints what happened, with the seconds since each scene began. torchrun and python from the PATH.

set -u
work=$(mktemp -d)
export OMP_NUM_THREADS=1 GLOO_SOCKET_IFNAME=cable
small="trainer.accelerator=cpu +model.units=[1,1,1] logger=csv trainer.max_epochs=40"

set_up() {
    for i in 1 2; do
        ip netns add host$i
        ip -n host$i link set lo up
        mkdir -p /etc/netns/host$i  # ip netns exec shows it as /etc/hosts
        printf '127.0.0.1 localhost\n10.77.0.1 host1\n10.77.0.2 host2\n' >/etc/netns/host$i/hosts
    done
    ip link add cable netns host1 type veth peer name cable netns host2
    for i in 1 2; do
        ip -n host$i address add 10.77.0.$i/24 dev cable
        ip -n host$i link set cable up
    done
}

clean_up() {
    lose 1
    lose 2
    ip netns delete host1
    ip netns delete host2
    rm -r /etc/netns/host1 /etc/netns/host2 "$work"
}

on_host() { # HOST COMMAND...: with the network and the name of the host
    ip netns exec "host$1" unshare --uts sh -c 'hostname "$0" && exec "$@"' "host$1" "${@:2}"
}

lose() { # HOST: as its power does
    ip netns pids "host$1" | xargs -r kill -9
}

guide() { # FIRST WORDS: the block of the guide with this line, for one process on each host
    sed -n "/^$1/,/^\`\`\`/p" docs/guide/runs.md | sed -e '/^```/d' -e 's/HOST:/host1:/' \
        -e 's/per_node=4/per_node=1/' -e 's/devices=4/devices=1/' -e "s#SHARED/NAME#$run#" \
        -e "s/ \.\.\.\$/ $small/" -e "s/model=revnet110 data=cifar10/$small/"
}

start() { # HOST: the guide's command
    on_host "$1" bash -c "$(guide 'torchrun --nnodes=2')" >>"$work/host$1.log" 2>&1
    say "host$1 ended with status $?"
}

say() {
    echo "$((SECONDS - began)) s: $*"
}

scene() {
    echo "$*"
    began=$SECONDS
    run=$work/run$began
}

reach() { # EPOCH
    until grep -q "epoch $1/" "$run/train.log" 2>/dev/null; do sleep 0.2; done
}

report() {
    python - "$run" <<'END'
import json, pathlib, sys
run = pathlib.Path(sys.argv[1])
summary = json.loads((run / "summary.json").read_text())
starts = [json.loads(line)["from_step"] for line in (run / "sessions.jsonl").open()]
print(f"    {summary['steps']} steps, starts at {starts}, stopped: {str(summary['stopped'])[:60]}")
END
}

set_up
trap clean_up EXIT

scene "Two machines train"
start 1 & start 2 &
wait
report

scene "A process is killed: torchrun starts both again"
start 1 & start 2 &
reach 5
kill -9 "$(ip netns pids host2 | sort -n | tail -1)"
say "killed"
wait
report

scene "The cable is cut"
start 1 & start 2 &
reach 5
ip -n host1 link set cable down
say "cut"
until grep -q "lost the connection" "$work/host1.log" && [ -e "$run/summary.json" ]; do sleep 1; done
say "the process of host1 ended"
report
lose 1
lose 2
wait
ip -n host1 link set cable up

scene "host2 is lost, and the command is given again on both"
start 1 & start 2 &
reach 5
lose 2
say "lost"
until grep -q "lost the connection.*$run" "$work/host1.log"; do sleep 1; done
say "the process of host1 ended"
lose 1 # torchrun waits for another machine, up to ten minutes
wait
report
start 1 & start 2 &
wait
report

scene "SLURM's script, preempted and queued again"
mkdir "$work/bin"
cat >"$work/bin/srun" <<END
#!/bin/bash
for i in 1 2; do
    ip netns exec host\$i env SLURM_PROCID=\$((i - 1)) SLURM_NODEID=\$((i - 1)) SLURM_LOCALID=0 \\
        SLURM_NTASKS=2 SLURM_NTASKS_PER_NODE=1 SLURM_NNODES=2 SLURM_STEP_NUM_TASKS=2 \\
        SLURM_NODELIST=host[1-2] "\$@" >>"$work/host\$i.log" 2>&1 &
    tasks="\${tasks-} \$!"
done
trap 'kill -TERM \$tasks' USR2
echo \$\$ >"$work/srun.pid"
worst=0
for task in \$tasks; do
    until wait \$task; status=\$?; ! kill -0 \$task 2>/dev/null; do :; done
    [ \$status -gt \$worst ] && worst=\$status
done
exit \$worst
END
printf '#!/bin/sh\necho "    scontrol $*"\n' >"$work/bin/scontrol"
chmod +x "$work"/bin/*
export SLURM_JOB_ID=41234 SLURM_JOB_NAME=train
guide '#!.bin.bash' | sed "s#outputs/#$work/#" >"$work/job.sh"
run=$work/slurm-$SLURM_JOB_ID
PATH=$work/bin:$PATH bash "$work/job.sh" &
reach 5
kill -USR2 "$(cat "$work/srun.pid")"
wait $!
say "the job ended with status $?"
report
PATH=$work/bin:$PATH bash "$work/job.sh"
say "the job ended with status $?"
report
