package process

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"testing"
)

// An interpreter outside of /usr needs its libraries, which are beside it.
func TestProgramFiles(t *testing.T) {
	for _, c := range []struct{ name, mark, want string }{
		{"venv", "pyvenv.cfg", ""},
		{"version of Python", "lib/python3.10/os.py", ""},
		{"version of Node", "lib/node_modules/npm/package.json", ""},
		{"home with packages of a user", "lib/python3.10/site-packages/x.py", "bin/program"},
	} {
		dir := t.TempDir()
		for _, file := range []string{"bin/program", c.mark} {
			path := filepath.Join(dir, file)
			if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path, nil, 0o755)); err != nil {
				t.Fatal(err)
			}
		}
		if got := programFiles(filepath.Join(dir, "bin/program")); !slices.Equal(got, []string{filepath.Join(dir, c.want)}) {
			t.Errorf("%s: %q", c.name, got)
		}
	}
}

// Of several programs of a package the one with its name is started.
func TestNPMBin(t *testing.T) {
	for _, c := range []struct{ name, bin, want string }{
		{"notes", `"cli.js"`, "cli.js"},
		{"notes", `{"other": "cli.js"}`, "cli.js"},
		{"notes", `{"admin": "admin.js", "notes": "cli.js"}`, "cli.js"},
		{"@acme/notes", `{"admin": "admin.js", "notes": "cli.js"}`, "cli.js"},
		{"notes", `{"admin": "admin.js", "other": "cli.js"}`, ""},
		{"notes", `"../../cli.js"`, ""},
	} {
		prefix := t.TempDir()
		dir := filepath.Join("node_modules", c.name)
		if err := errors.Join(os.MkdirAll(filepath.Join(prefix, dir), 0o755), os.WriteFile(filepath.Join(prefix, dir, "package.json"), []byte(`{"bin": `+c.bin+`}`), 0o644)); err != nil {
			t.Fatal(err)
		}
		want := c.want
		if want != "" {
			want = filepath.Join(dir, want)
		}
		if got, err := npmBin(prefix, c.name); got != want || (err != nil) != (want == "") {
			t.Errorf("%s with the programs %s: %q, %v, want %q", c.name, c.bin, got, err, want)
		}
	}
}
