# Completion of distrun for fish.

function __distrun_complete
    set -l words (commandline -opc)
    set -l program (string replace -r '^~/' "$HOME/" -- $words[1])
    set -l raw (commandline -ct | string collect)
    set -l current (string unescape -- "$raw" | string collect)
    test -n "$current"; or set current "$raw" # a quote is open
    set -l rest $words
    set -e rest[1]
    set -l lines ($program _complete fish $rest "$current" 2>/dev/null)
    set -l head (string split ' ' -- "$lines[1]")
    set -e lines[1]
    test (count $head) -eq 2; or return
    set -l kept (string sub -l $head[2] -- "$current")
    set -l path (string sub -s (math $head[2] + 1) -- "$current")
    switch $head[1]
        case files
            set lines (__fish_complete_path "$path")
        case dirs
            set lines (__fish_complete_directories "$path")
        case command
            set kept ''
            set -e words[1..$head[2]]
            set lines (complete -C (string join ' ' -- (string escape -- $words) "$raw"))
    end
    for line in $lines
        echo -- "$kept$line"
    end
end

complete -c distrun -f -k -a '(__distrun_complete)'
