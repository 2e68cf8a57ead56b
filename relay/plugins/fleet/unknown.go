package fleet

import (
	"cmp"
	"slices"
	"strings"

	"agentctl/manifest"
	"agentctl/suggest"
)

// UnknownBoard is the error for a board that a tenant does not have; all are those that it has. It is
// the same for a board of another tenant and for one that does not exist, so that tenants cannot be
// probed. It has names of operators and ids only.
func UnknownBoard(all []Board, ref string) *manifest.Error {
	message := "none of your boards has this name, id or start of an id"
	if near := nearest(all, ref); len(near) > 0 {
		message += "; near it: " + strings.Join(near, ", ")
	}
	return &manifest.Error{Code: manifest.SafetyDenied, Reason: "tenant", Message: message + "; fleet.find lists your boards"}
}

// Bounds of nearest: a call with a wrong name must not cost more than one with a right one.
const (
	maxNear     = 3    // boards in a message
	maxCompared = 5000 // names that are compared letter by letter
	maxDistance = 3    // letters that differ
)

// nearest returns the labels of the boards that ref was probably meant for, nearest first.
//
// It is one pass over the tenant's boards. Names of a length that cannot be near are not compared, since
// the edit distance is what costs; maxCompared bounds those that are.
func nearest(all []Board, ref string) []string {
	type candidate struct {
		label    string
		distance int
	}
	var found []candidate
	// Of a short text at most half may differ: a word of three other letters is not a typing error.
	compared, limit := 0, min(maxDistance, len(ref)/2)
	for i := range all {
		b, d := &all[i], maxDistance+1
		label := b.Label()
		if b.NameSet && compared < maxCompared && (abs(len(label)-len(ref)) <= limit || isPart(label, ref)) {
			compared++
			if d = suggest.Distance(ref, label); isPart(label, ref) {
				// A label that contains ref, or the reverse, is always near enough; names with
				// fewer differences come first.
				d = min(d, limit)
			}
		}
		if d = min(d, idDistance(b.ID, ref)); d <= limit {
			found = append(found, candidate{label, d})
		}
	}
	slices.SortFunc(found, func(a, b candidate) int {
		return cmp.Or(cmp.Compare(a.distance, b.distance), cmp.Compare(a.label, b.label))
	})
	var labels []string
	for _, c := range found[:min(maxNear, len(found))] {
		labels = append(labels, c.label)
	}
	return labels
}

// minPart is how long a name must be to count as part of another one.
const minPart = 3

// isPart reports whether one of two names has the other in it: attic and attic-cam.
func isPart(a, b string) bool {
	return min(len(a), len(b)) >= minPart && (strings.Contains(a, b) || strings.Contains(b, a))
}

// minIDStart is the length from which a text is compared with the starts of ids: shorter ones are
// nearly all the same, since an id begins with its time.
const minIDStart = 8

// idDistance counts the characters in which ref differs from the start of an id. It is no edit
// distance, since ids are copied and not typed, and there may be many.
func idDistance(id, ref string) (d int) {
	if len(ref) < minIDStart || len(ref) > len(id) {
		return maxDistance + 1
	}
	for i := range len(ref) {
		if id[i] != ref[i] {
			if d++; d > maxDistance {
				break
			}
		}
	}
	return d
}

func abs(n int) int { return max(n, -n) }
