package cli

import "runtime"

// IsLinux reports whether a daemon or a relay can be on this machine.
const IsLinux = runtime.GOOS == "linux"

// SystemName is what people call this operating system.
func SystemName() string {
	switch runtime.GOOS {
	case "darwin":
		return "macOS"
	case "windows":
		return "Windows"
	}
	return "Linux"
}
