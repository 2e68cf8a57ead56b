package daemon

import (
	"cmp"
	"strconv"
	"strings"
	"time"

	"agentctl/lazyregexp"
)

// release is what can be compared of a version: of a tag (v1.2.3, v1.2.3-rc.1), of `git describe`
// behind a tag (v1.2.3-14-gabcdef, with -dirty), or of Go's pseudo-versions, which are pre-releases
// by their form (https://go.dev/ref/mod#pseudo-versions).
type release struct {
	core    [3]int   // major, minor, patch
	pre     []string // identifiers of a pre-release; none: a release
	commits int      // behind the tag
}

// versionRE matches a version. git describe puts its commits last, so that a pre-release may have
// any form before them. Build metadata (+...) plays no part (SemVer 2.0.0 §10).
var versionRE = lazyregexp.New(`^v?(\d{1,9})\.(\d{1,9})\.(\d{1,9})(?:-([0-9A-Za-z.-]+?))??(?:-(\d{1,9})-g[0-9a-f]{4,40})?(?:-dirty)?(?:\+[0-9A-Za-z.-]+)?$`)

// parseRelease parses a version; ok is false for one that has no number, such as a bare commit.
func parseRelease(version string) (r release, ok bool) {
	m := versionRE.FindStringSubmatch(version)
	if m == nil {
		return r, false
	}
	for i := range r.core {
		r.core[i], _ = strconv.Atoi(m[i+1])
	}
	if m[4] != "" {
		r.pre = strings.Split(m[4], ".")
	}
	r.commits, _ = strconv.Atoi(m[5]) // "" is 0
	return r, true
}

// compareReleases orders releases by SemVer 2.0.0 §11, then by the commits behind the tag.
func compareReleases(a, b release) int {
	for i := range a.core {
		if c := cmp.Compare(a.core[i], b.core[i]); c != 0 {
			return c
		}
	}
	switch {
	case len(a.pre) == 0 && len(b.pre) > 0:
		return 1
	case len(a.pre) > 0 && len(b.pre) == 0:
		return -1
	}
	for i := range min(len(a.pre), len(b.pre)) {
		if c := comparePre(a.pre[i], b.pre[i]); c != 0 {
			return c
		}
	}
	return cmp.Or(cmp.Compare(len(a.pre), len(b.pre)), cmp.Compare(a.commits, b.commits))
}

// comparePre compares two identifiers: numbers by their value, and below words.
func comparePre(a, b string) int {
	m, aErr := strconv.ParseUint(a, 10, 64)
	n, bErr := strconv.ParseUint(b, 10, 64)
	switch {
	case aErr == nil && bErr == nil:
		return cmp.Compare(m, n)
	case aErr == nil:
		return -1
	case bErr == nil:
		return 1
	}
	return strings.Compare(a, b)
}

// isNewer reports whether a staged build is newer than the running one: by their versions or,
// where these have no order or are equal, by the times of their commits. A build whose order cannot
// be known is not newer.
func isNewer(staged, running Build) bool {
	a, aOK := parseRelease(staged.Version)
	b, bOK := parseRelease(running.Version)
	if aOK && bOK {
		if c := compareReleases(a, b); c != 0 {
			return c > 0
		}
	}
	isKnown := staged.Time.After(time.Unix(0, 0)) && running.Time.After(time.Unix(0, 0))
	return isKnown && staged.Time.After(running.Time)
}
