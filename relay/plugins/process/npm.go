package process

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"agentctl/lazyregexp"
	"agentctl/relay/plugins/sandbox"
)

// A server is often given as `npx -y PACKAGE`, which downloads the newest version of the package at each
// start. A plugin does not: what was reviewed would not be what runs, the first start may take a
// minute, and a sandboxed program cannot run what it downloaded. So the package is installed once,
// in the plugin's folder, and node runs it from there.

// NPMFolder is the folder in a plugin's folder with an installed package.
const NPMFolder = "server"

// npmTimeout bounds an installation.
const npmTimeout = 5 * time.Minute

// npmPackage is the name of a package in the registry, with a version or tag: no path, no URL.
var npmPackage = lazyregexp.New(`^(@[a-z0-9-~][a-z0-9-._~]*/)?[a-z0-9-~][a-z0-9-._~]*(@[A-Za-z0-9^~*][A-Za-z0-9.^~*+_-]*)?$`)

// ErrNotInstalled is the cause of the refusal of a command that downloads its program.
var ErrNotInstalled = errors.New("it downloads the server at each start; install the server first, and adopt the program that this installs")

// NPXPackage returns the package and the arguments of an npx command. isNPX is false for another
// command. Those of uvx and the like are refused with ErrNotInstalled.
func NPXPackage(command []string) (pkg string, args []string, isNPX bool, err error) {
	switch name := filepath.Base(command[0]); name {
	case "npx":
	case "uvx", "pipx", "bunx", "pnpx":
		return "", nil, false, fmt.Errorf("%s: %w", name, ErrNotInstalled)
	default:
		return "", nil, false, nil
	}
	for i, arg := range command[1:] {
		switch {
		case arg == "-y" || arg == "--yes" || arg == "-q" || arg == "--quiet" || arg == "--":
		case npmPackage.MatchString(arg):
			return arg, command[i+2:], true, nil
		default:
			return "", nil, true, fmt.Errorf("npx %s is not supported: use npx -y PACKAGE ARG..., with a package of the registry", printable(arg))
		}
	}
	return "", nil, true, errors.New("npx needs the name of a package")
}

// InstallNPM installs a package and what it needs in the folder NPMFolder of dir, without running any of
// its code, and returns the command that starts it in dir. npm, which must be in PATH, decides where
// the package comes from.
func InstallNPM(ctx context.Context, dir, pkg string) (command []string, err error) {
	ctx, cancel := context.WithTimeout(ctx, npmTimeout)
	defer cancel()
	prefix := filepath.Join(dir, NPMFolder)
	if err := os.MkdirAll(prefix, 0o755); err != nil {
		return nil, err
	}
	// npm looks for the folder to install in above a prefix without a package.json.
	if err := os.WriteFile(filepath.Join(prefix, "package.json"), []byte("{\"private\": true}\n"), 0o644); err != nil {
		return nil, err
	}
	// --ignore-scripts: otherwise packages could run programs during the installation, which has no sandbox.
	cmd := exec.CommandContext(ctx, "npm", "install", "--prefix", prefix, "--ignore-scripts", "--no-audit", "--no-fund", "--loglevel=error", "--", pkg)
	cmd.Dir = prefix
	out := &tailBuffer{}
	cmd.Stdout, cmd.Stderr = out, out
	cmd.WaitDelay = stopGrace
	if err := cmd.Run(); errors.Is(err, exec.ErrNotFound) {
		return nil, fmt.Errorf("npm is not installed, which is needed to install %s: %w", pkg, err)
	} else if err != nil {
		return nil, &AdoptError{fmt.Errorf("npm install %s: %w", pkg, err), out.String()}
	}
	name := pkg
	if i := strings.LastIndexByte(pkg, '@'); i > 0 {
		name = pkg[:i]
	}
	bin, err := npmBin(prefix, name)
	if err != nil {
		return nil, err
	}
	return []string{"node", "./" + filepath.ToSlash(filepath.Join(NPMFolder, bin))}, nil
}

// npmBin returns the program of an installed package, below prefix.
func npmBin(prefix, name string) (string, error) {
	dir := filepath.Join("node_modules", filepath.FromSlash(name))
	raw, err := os.ReadFile(filepath.Join(prefix, dir, "package.json"))
	if err != nil {
		return "", err
	}
	var p struct {
		Bin json.RawMessage `json:"bin"`
	}
	if err := json.Unmarshal(raw, &p); err != nil {
		return "", fmt.Errorf("package.json of %s: %w", name, err)
	}
	var bin string
	var bins map[string]string
	if json.Unmarshal(p.Bin, &bin) != nil && json.Unmarshal(p.Bin, &bins) == nil {
		bin = bins[name[strings.LastIndexByte(name, '/')+1:]] // without the scope of the package
		if names := slices.Sorted(maps.Keys(bins)); bin == "" && len(names) == 1 {
			bin = bins[names[0]]
		}
	}
	if bin == "" || !filepath.IsLocal(bin) {
		return "", fmt.Errorf("package %s has no program with its name; install it and adopt one of its programs", name)
	}
	return filepath.Join(dir, bin), nil
}

// CompleteCommand makes the paths in a command, which are relative to the working directory of who
// typed it, absolute, and returns the files and folders in it that the sandbox does not allow to read
// by itself.
func CompleteCommand(command []string) (complete, read []string, err error) {
	complete = slices.Clone(command)
	if strings.Contains(complete[0], "/") {
		if complete[0], err = filepath.Abs(complete[0]); err != nil {
			return nil, nil, err
		}
	} else if complete[0], err = exec.LookPath(complete[0]); err != nil {
		return nil, nil, err
	} else if complete[0], err = filepath.Abs(complete[0]); err != nil {
		return nil, nil, err
	}
	read = programFiles(complete[0])
	for i, arg := range complete[1:] {
		if strings.HasPrefix(arg, "-") {
			continue
		}
		if _, err := os.Stat(arg); err != nil || !strings.Contains(arg, "/") && !strings.Contains(arg, ".") {
			continue // "server" is a word, although there may be a folder of this name
		}
		if complete[i+1], err = filepath.Abs(arg); err != nil {
			return nil, nil, err
		}
		read = append(read, complete[i+1])
	}
	return complete, slices.DeleteFunc(read, sandbox.IsReadable), nil
}

// programFiles are what has to be readable for a program, besides itself: the environment that an
// interpreter belongs to (a venv or a version of Python, a version of Node), and what it is a link to.
func programFiles(path string) (files []string) {
	for _, p := range []string{path, realPath(path)} {
		if sandbox.IsReadable(p) {
			continue
		}
		above := filepath.Dir(filepath.Dir(p))
		for _, mark := range []string{"pyvenv.cfg", "lib/python3*/os.py", "lib/node_modules/npm"} {
			if found, _ := filepath.Glob(filepath.Join(above, mark)); len(found) > 0 && filepath.Base(filepath.Dir(p)) == "bin" {
				p = above
				break
			}
		}
		files = append(files, p)
	}
	return slices.Compact(files)
}

// realPath follows links; a path that leads nowhere is returned as it is.
func realPath(path string) string {
	if real, err := filepath.EvalSymlinks(path); err == nil {
		return real
	}
	return path
}
