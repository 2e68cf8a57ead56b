package kernel

import "strings"

// maxVersion bounds a version's bytes.
const maxVersion = 64

// validVersion tells whether v is a semantic version (semver.org 2.0.0): three numbers, a
// pre-release behind "-", a build behind "+".
func validVersion(v string) bool {
	if len(v) > maxVersion {
		return false
	}
	v, build, hasBuild := strings.Cut(v, "+")
	if hasBuild && !identifiers(build, false) {
		return false
	}
	v, pre, hasPre := strings.Cut(v, "-")
	if hasPre && !identifiers(pre, true) {
		return false
	}
	numbers := 0
	for n := range strings.SplitSeq(v, ".") {
		if numbers++; !digits(n) || leadingZero(n) {
			return false
		}
	}
	return numbers == 3
}

// identifiers checks words between dots; numbers of a pre-release have no leading zero.
func identifiers(s string, pre bool) bool {
	for w := range strings.SplitSeq(s, ".") {
		for i := 0; i < len(w); i++ {
			if c := w[i]; (c < '0' || c > '9') && (c < 'a' || c > 'z') && (c < 'A' || c > 'Z') && c != '-' {
				return false
			}
		}
		if w == "" || (pre && digits(w) && leadingZero(w)) {
			return false
		}
	}
	return true
}

func digits(s string) bool {
	for i := 0; i < len(s); i++ {
		if s[i] < '0' || s[i] > '9' {
			return false
		}
	}
	return s != ""
}

func leadingZero(s string) bool { return len(s) > 1 && s[0] == '0' }
