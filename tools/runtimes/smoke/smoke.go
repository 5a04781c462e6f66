// Package smoke shows that the runtimes which tools/runtimes builds work together
// on this machine: its tests start a private containerd and take containers of
// both tiers through their life. It has no code of its own. The tests need root
// and built runtimes, and skip where either is missing.
package smoke
