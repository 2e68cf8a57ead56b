// Package suggest finds the known word that a mistyped word was probably meant to be.
//
//	suggest.Hint("base_intervall_ms", keys) // , did you mean "base_interval_ms"?
//
// It serves errors of people's input: keys of the configuration, flags and commands. A
// suggestion is never applied by itself.
package suggest

import (
	"fmt"
	"strings"
)

// maxWord bounds the words that are compared, bytes. Distance takes quadratic time.
const maxWord = 64

// Hint is `, did you mean "WORD"?` for the end of an error, "" when no word is near.
func Hint(word string, words []string) string {
	if near := Nearest(word, words); near != "" {
		return fmt.Sprintf(", did you mean %q?", near)
	}
	return ""
}

// Nearest returns the word that differs least from the given one, "" when none is near: at
// most 3 letters differ, and at most half of the given word's. A longer word also counts
// when the given one is its first part before a _ or its last part after a dot.
func Nearest(word string, words []string) string {
	best, limit := "", min(4, len(word)/2+1)
	for _, w := range words {
		if d := Distance(word, w); d < limit && d < len(w) {
			best, limit = w, d
		}
	}
	if best != "" || len(word) <= 2 {
		return best
	}
	for _, w := range words {
		if strings.HasPrefix(w, word+"_") || strings.HasSuffix(w, "."+word) {
			return w
		}
	}
	return ""
}

// Distance returns the optimal string alignment distance: the number of letters to insert,
// delete, replace or swap with their neighbor. Upper case in a counts as lower case. A word
// longer than maxWord is at least maxWord away from every other.
//
// It keeps three rows of the table of distances: two would do for the Levenshtein distance,
// the third one is for swapped neighbors. Letters are bytes, as in the words compared here.
func Distance(a, b string) int {
	if len(a) > maxWord || len(b) > maxWord {
		return maxWord
	}
	a = strings.ToLower(a)
	before, row, next := make([]int, len(b)+1), make([]int, len(b)+1), make([]int, len(b)+1)
	for j := range row {
		row[j] = j
	}
	for i := range len(a) {
		next[0] = i + 1
		for j := range len(b) {
			replace := row[j]
			if a[i] != b[j] {
				replace++
			}
			next[j+1] = min(replace, next[j]+1, row[j+1]+1)
			if i > 0 && j > 0 && a[i] == b[j-1] && a[i-1] == b[j] {
				next[j+1] = min(next[j+1], before[j-1]+1)
			}
		}
		before, row, next = row, next, before
	}
	return row[len(b)]
}
