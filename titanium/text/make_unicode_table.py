"""Writes unicode_table.inc: runs of code points with the same properties, as {first, flags}.

Run with Python and the package unicodedata2 16.0.0:  python make_unicode_table.py > unicode_table.inc
Unicode 16.0 is what the regex engine of Hugging Face's tokenizers 0.23 has for \\p{L}, \\p{N} and \\s (every code point
was compared).  The flags are those of unicode.h.
"""

import unicodedata2 as u

assert u.unidata_version == "16.0.0"

LETTER, NUMBER, SPACE, WORD, DIGITS, NFC_JOINS, NFC_REWRITES, UNPRINTABLE = (1 << i for i in range(8))

SPACES = {*range(0x9, 0xE), 0x85} | {c for c in range(0x110000) if u.category(chr(c)) in ("Zs", "Zl", "Zp")}
# Other_Alphabetic that is not a mark, and Join_Control: with letters, marks, Nd, Nl and Pc these are \w (UTS 18).
WORD_EXTRA = {0x200C, 0x200D, *range(0x24B6, 0x24EA), *range(0x1F130, 0x1F14A), *range(0x1F150, 0x1F16A),
              *range(0x1F170, 0x1F18A)}
# Rust's char::is_numeric is at Unicode 17 already, with these more.
NUMERIC_17 = {*range(0x11DE0, 0x11DEA), *range(0x16FF4, 0x16FF7)}

# Characters that can be the second of a primary composite, or that are reordered: nothing may be cut before them.
second = set()
for c in range(0x110000):
    parts = u.decomposition(chr(c)).split()
    if len(parts) == 2 and not parts[0].startswith("<"):
        second.add(int(parts[1], 16))
second |= set(range(0x1161, 0x1176)) | set(range(0x11A8, 0x11C3))  # Hangul vowels and finals


def flags(c):
    if 0xD800 <= c < 0xE000:
        return UNPRINTABLE
    ch, category = chr(c), u.category(chr(c))
    f = LETTER if category[0] == "L" else NUMBER | DIGITS if category[0] == "N" else 0
    f |= DIGITS if c in NUMERIC_17 else 0
    f |= SPACE if c in SPACES else 0
    f |= WORD if category[0] in "LM" or category in ("Nd", "Nl", "Pc") or c in WORD_EXTRA else 0
    f |= NFC_JOINS if u.combining(ch) or c in second else 0
    f |= NFC_REWRITES if u.normalize("NFC", ch) != ch else 0
    f |= UNPRINTABLE if category[0] in "CZ" and c != 0x20 else 0
    return f


runs, last = [], None
for c in range(0x110000):
    f = flags(c)
    if f != last:
        runs.append(f"{{{c:#x},{f}}}")
        last = f

print("// Written by make_unicode_table.py from Unicode 16.0.  Do not edit.")
line = ""
for run in runs:
    if len(line) + len(run) + 1 > 110:
        print(line)
        line = ""
    line += run + ","
print(line)
