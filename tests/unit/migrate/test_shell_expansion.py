"""Expansions, arithmetic and conditions have the values that bash computes.

Every expectation is also checked with bash itself.
"""

from __future__ import annotations

import shutil
import subprocess

import pytest

from sluice_migrate.bash.script import read_script

BASH = shutil.which("bash")
SET = "A=a; E=; P=/x/y.tar.gz; L=(1 'b c' 3); N=6; NONE=(); W='two words'\n"

LINES = {
    "default of an empty": "x ${E:-d} ${E-d} end",
    "default of an unset": "x ${U:-d} ${U-d} ${U:-$A$A} '${U:-d}'",
    "default with words": "x ${U:-p q} ${U:-'p q'} \"${U:-p q}\" \"${U:-'p'}\"",
    "default that is empty": 'x a"${U:-}"b ${U:-} "${U:-}"',
    "default of a default": "x ${U:-${V:-${A}}} ${U:-${E:-last}}",
    "default of a set": 'x ${A:-d} ${A-d} ${W:-d} "${W:-d}"',
    "assigns": "x ${U:=new} $U ${E:=full} $E ${A:=no} $A",
    "assigns without a colon": "x ${E=no} [$E] ${U=new} $U",
    "no-op assigns": ': "${U:=new}"; x $U',
    "alternative": 'x ${A:+yes} ${E:+no} ${E+yes} ${U+no} "${U:+no}" ${A:+one two}',
    "error of a set": "x ${A:?must be} ${E?may be empty}end",
    "cut behind": "x ${P%.gz} ${P%.*} ${P%%.*} ${P%/*} ${P%nothing}",
    "cut before": "x ${P#/x} ${P#*/} ${P##*/} ${P#nothing}",
    "cut what is quoted": 'x ${P%".*"} ${P##"*"/}',
    "replace": "x ${P/y/z} ${P//\\//-} ${P/.tar} ${P/#\\/x/Q} ${P/%gz/Z} ${P/x*r/Y}",
    "sets of characters": "x ${P//[a-y]/_} ${P//[!a-z]/_} ${P##*[./]} ${P//[]x]/_}",
    "classes of characters": "x ${W//[[:space:]]/_} ${P//[^[:alpha:]]/_} ${P%[[:lower:]]}",
    "substring": "x ${P:3} ${P:1:2} ${P: -2} ${P:(-2)} ${P:N-5:N/2}",
    "length": "x ${#P} ${#E} ${#L[@]} ${#L[1]} ${#NONE[@]}",
    "case": "x ${A^} ${A^^} ${W^^} ${P,,}",
    "indirect": 'B=A; x ${!B} "${!B}"',
    "positional": 'x $# $1 "$@" ${1:-none} end',
    "positional of set": "set -- p 'q r'; x $# $2 \"$@\" $@; shift; x $1",
    "array": 'x ${L[@]} end "${L[@]}" end "${L[*]}" ${L[*]}',
    "array elements": 'x ${L[0]} "${L[1]}" ${L[-1]} ${L} ${L[N-5]}',
    "array within a word": 'x "p${L[@]}s" p${L[@]}s',
    "empty array": 'x a "${NONE[@]}" b ${NONE[@]} c "${NONE[*]}"',
    "array with a default": 'x "${NONE[@]:-none}" "${L[@]:-none}" ${NONE[@]+no}',
    "array where it is set": 'x ${L[@]+"${L[@]}"} ${NONE[@]+"${NONE[@]}"} "${L[@]+"${L[@]}"}"',
    "array grows": 'L+=(4 5); L[1]=changed; x "${L[@]}"',
    "array joined": 'x "$(IFS=,; echo "${L[*]}")"',
    "words of a variable": 'x $W "$W" p$W"$W"s',
    "empty words": 'x $E "" \'\' "$E" end',
    "arithmetic": "x $((N+1)) $((2**3)) $((7/2)) $((-7/2)) $((-7%3)) $(((1+2)*N)) $((N>5)) $((!N))",
    "arithmetic choice": "x $((N > 5 ? 1 : 2)) $((N<<2)) $((N&3|8^1)) $((0x10)) $((010))",
    "arithmetic of text": "T=N; x $((T*2)) $(($T*2)) $((${N}*2))",
    "arithmetic assigns": "x $((M=3)) $M $((M+=2)) $((M++)) $M $((--M)); ((M*=4)); x $M",
    "braces": "x a{b,c}d {1..3} '{a,b}' {a} {} \"{a,b}\" {a,b}{1,2}",
    "quotes": 'x \'a"b\' "a\'b" a\\ b "\\$A" "\\x" $\'t\\tb\' "a\\\nb"',
    "hash": "x a#b # no",
    "commands": 'x "$(echo p q)" $(echo p q) $(basename /a/b.c .c) $(dirname /a/b/c) `echo t`',
    "pwd": 'x "$(cd /usr && pwd)" "$(cd /usr/lib/.. && pwd)"',
    "nested commands": 'x "$(basename "$(dirname "/a/b/c")")" "$(echo "$A-$(echo $N)")"',
    "printf": "x $(printf '%s-%d' a 3) \"$(printf %s \"$W\")\"; printf -v V '%s' q; x $V",
    "seq": "x $(seq 3) $(seq 2 2 6)",
    "temporary": "f() { echo $T; }; T=1; x $(T=2 f) $T",
    "if": "if [ $N -gt 5 ]; then x big; else x small; fi",
    "elif": 'if [ -z "$A" ]; then x 1; elif [[ $A == a* ]]; then x 2; else x 3; fi',
    "tests": '[ "$A" = a ] && x 1; [ -n "$E" ] || x 2; [ "$U" ] && x 3; [ ! "$E" ] && x 4',
    "joined tests": '[ $N -eq 6 -a "$A" != b ] && x 1; [ "$U" = 1 ] || { [ $A = a ] && x 2; }',
    "double tests": '[[ -z $U && ( $N -lt 7 || $A = b ) ]] && x 1; [[ $W == "two"* ]] && x 2',
    "regular expression": "[[ $P =~ ^/x/.*gz$ ]] && x 1; [[ $P =~ (tar|zip)$ ]] || x 2",
    "not": "! [ $N = 6 ] || x 1; if ! [[ $A = b ]]; then x 2; fi",
    "arithmetic condition": "(( N > 5 )) && x 1; if (( N % 4 )); then x 2; fi; ((U)) || x 3",
    "case of": 'case "$A" in b|c) x 1 ;; a) x 2 ;; *) x 3 ;; esac; case $P in *.gz) x gz;; esac',
    "case of nothing": "case $U in gpu) x 1 ;; '') x empty ;; esac",
    "for": 'for i in 1 $W "$W"; do x $i; done; for i in "${L[@]}"; do x "$i"; done',
    "counted for": "for ((i=0; i<3; i++)); do L[i]=$((i*i)); x $i; done",
    "while": "i=0; while [ $i -lt 3 ]; do i=$((i+1)); [ $i = 2 ] && continue; x $i; done",
    "break": "for i in 1 2 3; do [ $i = 2 ] && break; x $i; done; x end",
    "function": 'f() { local A=in; x $A "$1" $#; }; f "p q" r; x $A',
    "function with a keyword": "function f { x $1; }; f 1; f 2",
    "function that returns": "f() { [ $1 = 1 ] && return; x $1; }; f 1; f 2",
    "subshell": "(A=in; x $A); x $A; { A=out; }; x $A",
    "redirections": "x > /dev/null a 2>&1; x b >&2; x c &> /dev/null; x d 2>/dev/null",
    "here-document": "cat <<EOF > /dev/null\nx 'not closed\nEOF\nx y",
    "pipe": "x a | cat; x b |& cat",
    "background": "x a & wait; x b",
    "lines": "x \\\n  --a 1 \\\n  --b",
}


def read(line: str) -> list[list[str]]:
    script = read_script(SET + line)
    return [[w.text for w in c.words] for c in script.commands if c.words[0].text == "x"]


def run(line: str) -> list[list[str]]:
    """Return the calls of `x` in bash, recorded on a descriptor that lines do not redirect."""
    preamble = 'exec 9>&1\nx() { printf \'%s\\0\' "$#" "$@" >&9; }\n'
    answer = subprocess.run(
        [str(BASH), "--norc", "-c", f"{preamble}{SET}{line}"],
        capture_output=True, timeout=20, env={"PATH": "/usr/bin:/bin"},
    )  # fmt: skip
    words, commands = answer.stdout.decode().split("\0")[:-1], []
    while words:
        count = int(words.pop(0))
        commands.append(["x", *words[:count]])
        words = words[count:]
    return commands


@pytest.mark.skipif(BASH is None, reason="there is no bash")
@pytest.mark.parametrize("line", LINES.values(), ids=LINES)
def test_a_line_is_expanded_as_bash_does(line: str) -> None:
    assert read(line) == run(line)
