#compdef distrun
# Completion of distrun for zsh.

_distrun() {
    local program=${(Q)words[1]} what number
    local -a lines
    program=${program/#\~\//$HOME/}
    lines=("${(@f)$("$program" _complete zsh "${(@Q)words[2,CURRENT-1]}" "${(Q)PREFIX}" 2>/dev/null)}")
    what=${lines[1]% *} number=${lines[1]#* }
    shift lines
    if [[ $what != command ]] && (( number )); then compset -p $number; fi
    case $what in
        values) (( $#lines )) && _describe -V distrun lines ;;
        files) _files ;;
        dirs) _files -/ ;;
        command)
            shift $number words
            (( CURRENT -= number ))
            _normal -p distrun
            ;;
    esac
}

if [[ $funcstack[1] == _distrun ]]; then _distrun; else compdef _distrun distrun; fi
