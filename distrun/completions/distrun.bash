# Completion of distrun for bash 4.4 or newer. What distrun answers is quoted already, and never evaluated.

_distrun() {
    local what='' line
    COMPREPLY=()
    {
        read -r what _
        while IFS= read -r line; do COMPREPLY+=("$line"); done
    } < <("${COMP_WORDS[0]/#\~\//$HOME/}" _complete bash "${COMP_LINE:0:COMP_POINT}" 2>/dev/null)
    case $what in
        files | command) compopt -o default ;;
        dirs) compopt -o dirnames ;;
        programs)
            compopt -o default -o filenames
            mapfile -t COMPREPLY < <(compgen -c -- "${COMP_WORDS[COMP_CWORD]}")
            ;;
    esac
}

complete -F _distrun distrun
