package process

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"syscall"
	"time"

	"agentctl/atomicfile"
)

// Stage is a folder beside those of the plugins, in which a server is installed before it takes the
// place of the one that a plugin has: it runs there first, for its adoption, and what was adopted
// before stays as it is if that fails. It is in the plugin directory so that a rename is enough.
type Stage struct{ dir string }

const (
	// stagePrefix cannot begin the name of a plugin, so that a stage is never taken for one.
	stagePrefix = ".adopt-"
	// staleStage is longer than an installation may take (npmTimeout): an older stage was left behind
	// by a process that was killed.
	staleStage = time.Hour
)

// NewStage makes a stage in a plugin directory, which is made if it is missing, and removes those
// that killed processes left behind. The caller removes it.
func NewStage(pluginDir string) (*Stage, error) {
	if err := atomicfile.MkdirAll(pluginDir, 0o755); err != nil {
		return nil, err
	}
	removeStaleStages(pluginDir)
	dir, err := os.MkdirTemp(pluginDir, stagePrefix)
	if err != nil {
		return nil, err
	}
	s := &Stage{dir}
	if err := os.Chmod(dir, 0o755); err != nil { // the relay's user starts what root installs
		s.Remove()
		return nil, err
	}
	return s, nil
}

// removeStaleStages removes the stages that killed processes left behind.
func removeStaleStages(pluginDir string) {
	stages, _ := filepath.Glob(filepath.Join(pluginDir, stagePrefix+"*"))
	for _, stage := range stages {
		if st, err := os.Lstat(stage); err == nil && time.Since(st.ModTime()) > staleStage {
			_ = os.RemoveAll(stage)
		}
	}
}

// Dir is the path of the stage.
func (s *Stage) Dir() string { return s.dir }

// Remove removes the stage with what is still in it. A stage that cannot be removed is removed as a
// stale one later.
func (s *Stage) Remove() { _ = os.RemoveAll(s.dir) }

// GiveTo makes a user the owner of the stage and of all that is in it: as this user the relay can
// replace and remove it later. nil is the user of this process. That user can replace the stage by
// another folder meanwhile, so nothing is changed in one that this process did not make, and a
// folder becomes the user's after all that is in it.
func (s *Stage) GiveTo(user *syscall.Credential) error {
	if user == nil {
		return nil
	}
	root, err := os.OpenRoot(s.dir)
	if err != nil {
		return err
	}
	defer func() { _ = root.Close() }()
	if st, err := root.Stat("."); err != nil {
		return err
	} else if sys, ok := st.Sys().(*syscall.Stat_t); !ok || int(sys.Uid) != os.Geteuid() {
		return fmt.Errorf("%s was replaced by another folder", s.dir)
	}
	var paths []string
	err = fs.WalkDir(root.FS(), ".", func(path string, _ fs.DirEntry, err error) error {
		paths = append(paths, path)
		return err
	})
	if err != nil {
		return err
	}
	for _, path := range slices.Backward(paths) {
		if err := root.Lchown(path, int(user.Uid), int(user.Gid)); err != nil {
			return err
		}
	}
	return nil
}

// WriteFolder writes manifest into the folder of a plugin, after the package that is installed in
// stage, if there is a stage and a package in it, has replaced the one in the folder. If the process is
// killed in between, the old manifest is left with the new package, and tools that differ from the
// manifest are withdrawn.
func WriteFolder(folder string, stage *Stage, manifest []byte) error {
	if err := atomicfile.MkdirAll(folder, 0o755); err != nil {
		return err
	}
	if stage != nil {
		if err := stage.replaceServer(filepath.Join(folder, NPMFolder)); err != nil {
			return err
		}
	}
	return atomicfile.ReplaceMode(filepath.Join(folder, manifestFile), manifest, 0o644)
}

// replaceServer moves the installed package of the stage to the path server.
//
// The old one is moved into the stage and not removed first, because removing it takes longer than
// two renames: a process that is killed meanwhile would leave a part of it.
// If it is killed between the two renames, the plugin has no package: it has to be adopted again.
func (s *Stage) replaceServer(server string) error {
	installed := filepath.Join(s.dir, NPMFolder)
	if _, err := os.Stat(installed); err != nil {
		return nil // the command is no package
	}
	old := filepath.Join(s.dir, "old")
	if err := os.Rename(server, old); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	if err := os.Rename(installed, server); err != nil {
		_ = os.Rename(old, server)
		return err
	}
	return nil
}

// OwnerOf returns the owner of dir, whose relay this process works for, if this process is root's
// and the owner is another user; else nil, which is the user of this process.
func OwnerOf(dir string) *syscall.Credential {
	st, err := os.Stat(dir)
	if err != nil || os.Geteuid() != 0 {
		return nil
	}
	sys, ok := st.Sys().(*syscall.Stat_t)
	if !ok || sys.Uid == 0 {
		return nil
	}
	return &syscall.Credential{Uid: sys.Uid, Gid: sys.Gid}
}
