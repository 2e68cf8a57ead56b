package process

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"

	"go.uber.org/zap"

	"agentctl/lazyregexp"
	"agentctl/relay/plugins/sandbox"
)

// The plugin directory decides which programs run on the relay's machine, and its manifests
// what of that machine they may use. Therefore open
// checks the directory, the plugin's folder, its manifest and its executable: none may be a
// link, writable by group or others, or owned by a user other than root and the relay's.
// Paths are resolved below an os.Root, so that a link inside of the directory cannot lead
// out of it.

// Names in a plugin's folder.
const (
	manifestFile = "plugin.json"
	runFile      = "run"
	socketFile   = "run.sock"
)

// SocketPath is where a plugin that somebody else starts has its socket (SandboxExternal), in a
// plugin directory.
func SocketPath(dir, name string) string { return filepath.Join(dir, name, socketFile) }

// tempFolders are the folders for temporary files in a plugin's folder for data. Two versions that
// run at the same time have one each, since it is emptied at each start.
var tempFolders = [2]string{"tmp", "tmp2"}

// folderName is the form of a plugin's name, which is also the name of its folder.
var folderName = lazyregexp.New(`^[a-z][a-z0-9_]{0,31}$`)

// reservedNames are names whose tools or resources belong to the relay. kernel to conformance are built-in plugins.
// The names of boards' tools begin with sys or sysecho; agents, devices and schemas are hosts in URIs of
// the relay's resources. Names of Options.Bundled are not among them: a relay without that plugin leaves its name
// to a folder.
var reservedNames = []string{"kernel", "tickets", "directory", "fleet", "conformance", "agents", "devices", "schemas", "sys", "sysecho"}

// CheckName returns why a name cannot be that of a plugin.
func CheckName(name string) error {
	if !folderName.MatchString(name) || slices.Contains(reservedNames, name) {
		return fmt.Errorf("%q cannot be the name of a plugin: a letter, then a-z, 0-9 and _, at most 32, and none of %s", name, strings.Join(reservedNames, ", "))
	}
	return nil
}

// open reads and checks the folder of a plugin. A user who can write to it can run
// programs on the relay's machine, so only the relay's user and root may.
//
// A folder with neither an executable nor a socket is refused. Of a socket only its existence
// is checked: the relay runs nothing of it, and the folder's owner decides which one it is. temp is
// the one of tempFolders to use.
func (h *Host) open(name, temp string) (s source, err error) {
	if b, ok := h.o.Bundled[name]; ok {
		s, err = h.source(name, b.Manifest)
		s.dial = b.dial(h.log.With(zap.String("plugin", name)))
		return s, err
	}
	if h.o.Dir == "" {
		return s, errors.New("the relay has no plugin directory; set one with --plugin-dir")
	}
	if err := CheckName(name); err != nil {
		return s, err
	}
	root, err := os.OpenRoot(h.o.Dir)
	if err != nil {
		return s, fmt.Errorf("open the plugin directory: %w", err)
	}
	defer func() { _ = root.Close() }()
	for _, f := range []struct {
		path string
		typ  fs.FileMode
	}{{".", fs.ModeDir}, {name, fs.ModeDir}, {filepath.Join(name, manifestFile), 0}} {
		if err := checkOwner(root, f.path, f.typ); err != nil { // an owner could replace what is below
			return s, err
		}
	}
	raw, err := readManifest(root, name)
	if err != nil {
		return s, err
	}
	if s, err = h.source(name, raw); err != nil {
		return s, err
	}
	s.temp = temp
	err = h.findServer(root, &s)
	return s, err
}

// source reads the manifest of a plugin of that name. dial is still to be set.
func (h *Host) source(name string, raw []byte) (s source, err error) {
	m, declared, err := parse(raw)
	if err != nil {
		return s, fmt.Errorf("%s of plugin %s: %w", manifestFile, name, err)
	}
	if m.Name != name {
		return s, fmt.Errorf("%s of plugin %s names the plugin %s: rename the folder or the plugin", manifestFile, name, m.Name)
	}
	templates, err := declared.compileTemplates()
	if err != nil {
		return s, fmt.Errorf("%s of plugin %s: %w", manifestFile, name, err)
	}
	return source{
		manifest: m, declared: declared, digest: Digest(raw),
		tools: declared.serverTools(), templates: templates, kernel: h.o.Kernel, events: h.o.Log, bus: h.o.Bus,
	}, nil
}

// differs reports whether the folder has another manifest or program than s was made of. It does not
// compare files that the program loads, such as modules of an interpreter.
func (s source) differs(old source) bool {
	return s.digest != old.digest || s.program != old.program || s.socket != old.socket
}

// fileID identifies a file and its content, as far as that is possible without reading it: another
// file, or one that was written, has another one. A hash would be certain, but each SIGHUP would read
// programs of many megabytes.
func fileID(st os.FileInfo) string {
	id := fmt.Sprint(st.Size(), st.ModTime().UnixNano())
	if sys, ok := st.Sys().(*syscall.Stat_t); ok {
		id += fmt.Sprint(" ", sys.Dev, sys.Ino)
	}
	return id
}

// socketID is the fileID of the socket of a server that the relay does not start; "" if there is
// none.
func (s source) socketID() string {
	st, err := os.Stat(s.socket)
	if s.socket == "" || err != nil {
		return ""
	}
	return fileID(st)
}

// findServer decides how a plugin is reached: at the socket of its service, by starting its
// executable, or at the socket in its folder, the first of these that is there. It sets
// the manifest's Sandbox.
func (h *Host) findServer(root *os.Root, s *source) error {
	m, name, declared := s.manifest, s.manifest.Name, s.declared
	dir, err := filepath.Abs(filepath.Join(h.o.Dir, name))
	if err != nil {
		return err
	}
	if path, err := h.serviceSocket(name); err != nil || path != "" {
		m.Sandbox = SandboxService
		s.socket, s.dial = path, socketDialer(path)
		if st, err := root.Lstat(filepath.Join(name, runFile)); err == nil {
			s.program = fileID(st) // what the service starts
		}
		return err
	}
	if len(declared.Command) > 0 { // findProgram checks it
	} else if err := checkOwner(root, filepath.Join(name, runFile), 0); errors.Is(err, fs.ErrNotExist) {
		if _, err := root.Lstat(filepath.Join(name, socketFile)); err != nil {
			return fmt.Errorf("plugin %s has neither an executable %q nor a socket %q in its folder, and no command in its %s", name, runFile, socketFile, manifestFile)
		}
		m.Sandbox = SandboxExternal
		s.socket = filepath.Join(dir, socketFile)
		s.dial = socketDialer(s.socket)
		return nil
	} else if err != nil {
		return err
	}
	c := &child{name: name, dir: dir, sandbox: !h.o.NoSandbox}
	if h.o.DataDir != "" {
		if c.data, err = filepath.Abs(filepath.Join(h.o.DataDir, name)); err != nil {
			return err
		}
	}
	if c.program, err = findProgram(dir, cmp.Or(c.data, dir), declared); err != nil {
		return fmt.Errorf("%s of plugin %s: %w", manifestFile, name, err)
	}
	for _, file := range append([]string{c.program.path}, c.program.args...) {
		if !filepath.IsAbs(file) {
			file = filepath.Join(dir, file)
		}
		if st, err := os.Stat(file); err == nil && st.Mode().IsRegular() {
			s.program += fileID(st) + "\n"
		}
	}
	m.Sandbox = SandboxOff
	if c.sandbox {
		m.Sandbox = SandboxLandlock
		if c.policy, err = h.policy(dir, c.data, declared.Sandbox); err != nil {
			return fmt.Errorf("%s of plugin %s: %w", manifestFile, name, err)
		}
		c.policy.Temp = s.temp
	}
	s.dial = c.dial(h.log.With(zap.String("plugin", name)))
	return nil
}

// policy is what a plugin in dir may use, with what its manifest asks for. The sandbox checks
// when it starts that none of it is private. A manifest that asks for nothing gets the plugin's folder,
// its data and what the sandbox allows to all.
func (h *Host) policy(dir, data string, wants DeclaredSandbox) (sandbox.Policy, error) {
	p := sandbox.Policy{Folder: dir, Data: data, NoNetwork: wants.Network != nil && !*wants.Network}
	for _, f := range []struct {
		to    *[]string
		paths []string
	}{{&p.Read, wants.Read}, {&p.Write, wants.Write}} {
		for _, path := range f.paths {
			if rest, ok := strings.CutPrefix(path, "~/"); ok {
				home, err := os.UserHomeDir()
				if err != nil {
					return p, fmt.Errorf("sandbox: %s: the relay has no home directory: %w", path, err)
				}
				path = filepath.Join(home, rest)
			}
			*f.to = append(*f.to, path)
		}
	}
	for _, path := range h.o.Private {
		path, err := filepath.Abs(path)
		if err != nil {
			return p, err
		}
		p.Private = append(p.Private, path)
	}
	return p, nil
}

// serviceSocket returns the path of the socket of a plugin's service, or "" if it has none. A
// user who could replace it would be given calls, so that only root and the relay's user may.
func (h *Host) serviceSocket(name string) (string, error) {
	if h.o.SocketDir == "" {
		return "", nil
	}
	root, err := os.OpenRoot(h.o.SocketDir)
	if errors.Is(err, fs.ErrNotExist) {
		return "", nil
	} else if err != nil {
		return "", fmt.Errorf("open the directory of the plugins' sockets: %w", err)
	}
	defer func() { _ = root.Close() }()
	file := name + ".sock"
	if _, err := root.Lstat(file); errors.Is(err, fs.ErrNotExist) {
		return "", nil
	}
	return filepath.Join(h.o.SocketDir, file), checkOwner(root, ".", fs.ModeDir)
}

// readManifest reads a manifest, and no more than MaxManifest of a larger file.
func readManifest(root *os.Root, name string) ([]byte, error) {
	f, err := root.Open(filepath.Join(name, manifestFile))
	if err != nil {
		return nil, err
	}
	defer func() { _ = f.Close() }()
	raw, err := io.ReadAll(io.LimitReader(f, MaxManifest+1))
	if err == nil && len(raw) > MaxManifest {
		err = fmt.Errorf("%s of plugin %s is larger than 1 MiB", manifestFile, name)
	}
	return raw, err
}

// checkOwner checks that path is of the type, not a link, and writable by root and the
// user of this process only. Parents of the plugin directory are not checked: the operator
// chose that path.
func checkOwner(root *os.Root, path string, typ fs.FileMode) error {
	st, err := root.Lstat(path)
	at := filepath.Join(root.Name(), path)
	switch {
	case err != nil:
		return fmt.Errorf("plugin: %w", err)
	case st.Mode().Type() != typ:
		return fmt.Errorf("plugin: %s must be a %s, not a link or anything else", path, map[fs.FileMode]string{0: "file", fs.ModeDir: "folder"}[typ])
	case st.Mode().Perm()&0o022 != 0:
		return fmt.Errorf("plugin: other users may write %s; fix it with: chmod go-w %s", at, at)
	}
	if sys, ok := st.Sys().(*syscall.Stat_t); ok && sys.Uid != 0 && int(sys.Uid) != os.Geteuid() {
		return fmt.Errorf("plugin: %s belongs to uid %d, who could change what the relay runs; fix it with: chown %d %s", at, sys.Uid, os.Geteuid(), at)
	}
	return nil
}
