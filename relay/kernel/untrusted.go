package kernel

import (
	"bytes"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"slices"
	"unicode"
	"unicode/utf16"
	"unicode/utf8"
)

// MetaUntrusted is the member of a result's _meta that says: text in this result was written by
// boards or by callers. A model treats it as data and not as instructions.
const MetaUntrusted = "agentctl/untrusted"

// UntrustedMeta is the _meta of a result that has no other member.
var UntrustedMeta = json.RawMessage(`{"` + MetaUntrusted + `":true}`)

// markUntrusted makes the text of an answer safe to show to a model, if the plugin's answers are
// untrusted and the request asks for it. It copies the result rather than changing it in place:
// a plugin may return one to several callers.
func (l *loaded) markUntrusted(r *Request, res *Result) *Result {
	if !r.MarkUntrusted || !l.manifest.Untrusted {
		return res
	}
	out := *res
	out.Structured, out.Data = showInvisible(res.Structured), showInvisible(res.Data)
	for i, block := range res.Content {
		if shown := showInvisible(block); len(shown) != len(block) {
			if &out.Content[0] == &res.Content[0] {
				out.Content = slices.Clone(res.Content)
			}
			out.Content[i] = shown
		}
	}
	out.Meta = JoinMeta(UntrustedMeta, res.Meta)
	return &out
}

// JoinMeta returns a _meta with the members of both. a is an object that is not empty; b may be
// anything, since plugins write it, and is left out if it is no object with members.
func JoinMeta(a, b json.RawMessage) json.RawMessage {
	if b = bytes.TrimSpace(b); len(b) < 2 || b[0] != '{' || len(bytes.TrimSpace(b[1:])) == 1 {
		return a
	}
	return append(append(slices.Clone(a[:len(a)-1]), ','), b[1:]...)
}

// showInvisible returns JSON in whose strings invisible characters are visible escapes: the text
// \u200B in place of the character. Such characters hide instructions from a person who reads the
// same text as the model, or reverse the order in which it is shown. JSON without any is returned
// as it is; most answers are ASCII, which is seen at once.
func showInvisible[T ~[]byte](raw T) T {
	var out T
	copied := 0 // raw[:copied] is in out
	for i := 0; i < len(raw); {
		c, size := rune(raw[i]), 1
		switch {
		case c == '\\':
			c, size = escapedRune(raw[i:])
		case c >= utf8.RuneSelf:
			c, size = utf8.DecodeRune(raw[i:])
		}
		if isInvisible(c) {
			out = append(out, raw[copied:i]...)
			if c <= 0xFFFF {
				out = fmt.Appendf(out, `\\u%04X`, c)
			} else {
				out = fmt.Appendf(out, `\\U%08X`, c)
			}
			copied = i + size
		}
		i += size
	}
	if copied == 0 {
		return raw
	}
	return append(out, raw[copied:]...)
}

// isInvisible reports whether a character shows nothing, or changes how others are shown: format
// characters (zero-width, bidirectional, tags), variation selectors, fillers, line separators and
// controls. Tab and line break are text. The controls of ASCII come in JSON only as escapes.
func isInvisible(c rune) bool {
	switch {
	case c < 0x20:
		return c != '\t' && c != '\n' && c != '\r'
	case c < 0x7F:
		return false
	case c < 0xA0:
		return true
	}
	switch c {
	case 0x034F, 0x115F, 0x1160, 0x17B4, 0x17B5, 0x2028, 0x2029, 0x2800, 0x3164, 0xFFA0:
		return true
	}
	// Cf has no unassigned characters; those among the tags are invisible all the same.
	return unicode.In(c, unicode.Cf, unicode.Variation_Selector) || c >= 0xE0000 && c <= 0xE0FFF
}

// escapedRune decodes the escape at the start of s, a surrogate pair too. An escape without a
// character that matters here, such as \n or \\, is a space of its size.
func escapedRune(s []byte) (c rune, size int) {
	if len(s) < 2 {
		return ' ', len(s)
	}
	c, ok := hexRune(s)
	if !ok {
		return ' ', 2
	}
	if utf16.IsSurrogate(c) {
		if low, ok := hexRune(s[6:]); ok {
			if pair := utf16.DecodeRune(c, low); pair != unicode.ReplacementChar {
				return pair, 12
			}
		}
	}
	return c, 6
}

// hexRune decodes an escape of four hex digits at the start of s.
func hexRune(s []byte) (rune, bool) {
	var b [2]byte
	if len(s) < 6 || s[0] != '\\' || s[1] != 'u' {
		return 0, false
	}
	if _, err := hex.Decode(b[:], s[2:6]); err != nil {
		return 0, false
	}
	return rune(b[0])<<8 | rune(b[1]), true
}
