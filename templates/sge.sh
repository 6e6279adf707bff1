#!/bin/sh
# Grid Engine runs this for the distrun job @{job}: on the first host of its parallel environment, or once for each task
# of an array. It starts an agent on every host (place), which dials the coordinator, and ends when all agents have.
# Other users may read this file. The secret with which agents prove themselves is not in it: it is waited for in
# a file of mode 0600 in the job's folder, if this host has that, or in $TMP, where the coordinator's qrsh puts it.

# Options of qsub may be given here, too:
#$ -S /bin/sh

# USR1 announces a suspension (-notify) or the end (s_rt). The agents get it, which --forward-signal tells what to do;
# here, and in qrsh, it is ignored. USR2 announces the end (-notify), which the agents hear of as TERM. Then the exit code
# is 140, as if USR2 had ended this, so that the accounting tells that it came from Grid Engine.
trap '' USR1
stopped=
trap 'stopped=140' USR2 TERM

folder=@{folder}
if [ -d "$folder" ] && [ -w "$folder" ]; then exec >>"$folder/agents.log" 2>&1; fi

delivered=${TMP:-$TMPDIR}/distrun-secret
waited=0
until [ -r "$folder/secret" ] || [ -r "$delivered" ] || [ -n "$stopped" ]; do
    if [ "$waited" -ge @{limit} ]; then
        echo "distrun: $(uname -n) does not see $folder, and the coordinator has not reached it by qrsh within @{limit} s" >&2
        exit 6
    fi
    sleep 1
    waited=$((waited + 1))
done
[ -z "$stopped" ] || exit "$stopped"
if [ -r "$delivered" ]; then secret=$(cat "$delivered"); else secret=$(cat "$folder/secret"); fi
rm -f "$delivered"

# program PLACE: write what a host executes. It travels by standard input, so no process list and no file has the secret.
# Here a subshell executes it: another shell could not set a trap for USR1, as it would start with USR1 ignored.
program() {
    echo "DISTRUN_ENGINE_PLACE=$1 DISTRUN_ENGINE_SECRET=$secret"
    cat <<'END'
export DISTRUN_ENGINE_PLACE DISTRUN_ENGINE_SECRET
trap '' USR1
@{agent} </dev/null &
agent=$!
unset DISTRUN_ENGINE_SECRET
stopped=
trap 'stopped=140; kill -TERM $agent' USR2 TERM
trap 'kill -USR1 $agent' USR1
while :; do
    wait $agent
    code=$?
    kill -0 $agent 2>/dev/null || break
done
exit ${stopped:-$code}
END
}

agents=
if ! [ -r "${PE_HOSTFILE-}" ]; then
    eval "$(program "$SGE_TASK_ID")" &
    agents=$!
else
    qrsh=$(command -v qrsh) || qrsh=$SGE_ROOT/bin/$ARC/qrsh
    first=
    started=' '
    while read -r host rest; do
        case $started in *" $host "*) continue ;; esac
        started="$started$host "
        if [ -z "$first" ]; then
            first=$host
            eval "$(program "$host")" &
        else
            program "$host" | "$qrsh" -inherit "$host" /bin/sh &
        fi
        agents="$agents $!"
    done <"$PE_HOSTFILE"
fi
# A signal interrupts wait. The agents decide when they end: at the coordinator's word, or when their lease is over.
code=0
for agent in $agents; do
    while :; do
        wait "$agent"
        last=$?
        kill -0 "$agent" 2>/dev/null || break
    done
    [ "$code" != 0 ] || code=$last
done
exit "${stopped:-$code}"
