package test

import (
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// TestArchitecturePage checks that the table of docs/architecture.md lists exactly the
// packages of the product.
func TestArchitecturePage(t *testing.T) {
	t.Parallel()
	b, err := os.ReadFile("../docs/architecture.md")
	if err != nil {
		t.Fatal(err)
	}
	table, _, _ := strings.Cut(string(b), "## The path of a sample")
	var listed, want []string
	for _, row := range regexp.MustCompile("(?m)^\\| `([a-z/]+)` \\|").FindAllStringSubmatch(table, -1) {
		listed = append(listed, row[1])
	}
	for _, p := range listPackages(t, "") {
		path := strings.TrimPrefix(p.ImportPath, "agentctl/")
		if !matchesAny([]string{"test/...", "docs/..."}, path) {
			want = append(want, path)
		}
	}
	for _, path := range listed {
		if !slices.Contains(want, path) {
			t.Errorf("docs/architecture.md lists %s, which does not exist", path)
		}
	}
	for _, path := range want {
		if !slices.Contains(listed, path) {
			t.Errorf("docs/architecture.md does not list %s", path)
		}
	}
}
